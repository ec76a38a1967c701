"""Dispatches the control messages that reach a worker: from judges, prefill peers and operators, and cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, decode_worker_control
from headrace.broker.errors import WireError
from headrace.broker.messages.control import (
    Abort,
    Answers,
    Done,
    Drain,
    Inspect,
    KvDump,
    LoadAdapter,
    Ping,
    Since,
    UnloadAdapter,
)
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.prefill import PrefillCheck, PrefillDone, PrefillDrop, PrefillState, PrefillTaken, SetRole
from headrace.broker.messages.requests import EncodeMedia, MediaEncoded, Record
from headrace.broker.prefill_client import PrefillClient
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.protocol.run import RunState
from headrace.broker.worker.operations import Inspector, OperatorCommands
from headrace.broker.worker.outbox import TokenOutbox
from headrace.broker.worker.runs import RunLifecycle
from headrace.broker.worker.state import EncodePort, WorkerState, note_command, reply
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Message

log = structlog.get_logger()

OPERATORS = (Drain, SetRole, LoadAdapter, UnloadAdapter)
"""Messages that only an operator may send: they come to a subject of their own, which workers may not publish to."""


PEERS = (PrefillTaken, PrefillDone, PrefillCheck, PrefillDrop, Ping, EncodeMedia)
"""Messages that another worker may send, at the subject that other workers may publish to."""


class JudgeInbox:
    def __init__(self, state: WorkerState, runs: RunLifecycle, outbox: TokenOutbox) -> None:
        self._state = state
        self._runs = runs
        self._outbox = outbox

    def on_cancel(self, message: Message) -> None:
        """Drop the runs of cancelled requests, and remember their ids for copies that are still on their way."""
        try:
            ids = decode(Cancel, message.data).ids
        except WireError as error:
            metrics.MALFORMED.labels("cancel").inc()
            log.error("cancel.malformed", error=str(error))
            return
        now = asyncio.get_running_loop().time()
        for request_id in ids:
            self._state.tombstones.add(request_id, now)
            for run in self._state.runs.of(request_id) or self._state.runs.of_job(request_id):
                self._runs.drop(run, how="cancelled")

    def on_answers(self, control: Answers) -> None:
        for answer in control.answers:
            for run in self._state.runs.of(answer.id):
                if (run.attempt, run.run) != (answer.attempt, answer.run):
                    continue
                if answer.verdict != "done" or run.state is RunState.ENDED:
                    self._runs.drop(run, how=answer.verdict)

    def on_abort(self, control: Abort) -> None:
        """Drop the named runs. Without a tombstone: the good run of the same request must live."""
        for ref in control.runs:
            run = self._state.runs.find(ref)
            if run is not None:
                self._runs.drop(run, how="stale")

    def on_since(self, control: Since) -> None:
        for item in control.items:
            for run in self._state.runs.of(item.id):
                self._outbox.resend(run, item.offsets)


class PrefillInbox:
    def __init__(self, client: PrefillClient, server: PrefillServer | None) -> None:
        self._client = client
        self._server = server

    def check(self, control: PrefillCheck) -> PrefillState:
        return PrefillState(state="unknown") if self._server is None else self._server.check(control.job)

    def drop(self, control: PrefillDrop) -> None:
        """Drop jobs that the decode worker wants no more."""
        if self._server is not None:
            for job in control.jobs:
                self._server.drop(job)

    def taken(self, control: PrefillTaken) -> Record:
        return self._client.on_taken(control)

    def done(self, control: PrefillDone) -> Record:
        return self._client.on_done(control)


class WorkerInbox:
    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        judges: JudgeInbox,
        prefill: PrefillInbox,
        commands: OperatorCommands,
        inspector: Inspector,
        encoding: EncodePort | None = None,
    ) -> None:
        self._messaging = deps.messaging
        self._state = state
        self._commands = commands
        self._inspector = inspector
        self._encoding = encoding
        # Each handler returns an answer, or None where there is none or it comes later.
        self._handlers: dict[type[Record], Callable[[Any, str], Record | None]] = {
            Answers: lambda control, _: judges.on_answers(control),
            Abort: lambda control, _: judges.on_abort(control),
            Since: lambda control, _: judges.on_since(control),
            PrefillTaken: lambda control, _: prefill.taken(control),
            PrefillDone: lambda control, _: prefill.done(control),
            PrefillCheck: lambda control, _: prefill.check(control),
            PrefillDrop: lambda control, _: prefill.drop(control),
            Drain: lambda control, _: self._on_drain(control),
            SetRole: lambda control, reply_to: commands.begin_role(control.role, control.grace_s, reply_to),
            EncodeMedia: self._on_encode,
            LoadAdapter: commands.begin_adapter,
            UnloadAdapter: commands.begin_adapter,
            KvDump: lambda _, __: self._on_dump(),
            Ping: lambda _, __: Done(),
            Inspect: lambda _, __: inspector.inspect(),
        }

    def on_control(self, message: Message) -> None:
        """Handle one message. An undecodable one is counted and logged."""
        try:
            control = decode_worker_control(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("control").inc()
            log.error("control.malformed", error=str(error))
            return
        if isinstance(control, OPERATORS):
            metrics.MALFORMED.labels("control").inc()
            log.warning("command.refused", kind=type(control).__name__, reason="it did not come to the subject of commands")
            reply(self._messaging, message.reply, Done(ok=False, message="commands are taken at the subject of commands only"))
            return
        self._handle(control, message)

    def on_peer(self, message: Message) -> None:
        """Handle a message of another worker. What only judges and routers may say is counted and logged."""
        try:
            control = decode_worker_control(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("control").inc()
            log.error("control.malformed", error=str(error))
            return
        if not isinstance(control, PEERS):
            metrics.FORGED.labels("control").inc()
            log.warning("message.forged", kind=type(control).__name__, reason="a worker may not say that to another one")
            return
        self._handle(control, message)

    def on_operator(self, message: Message) -> bool:
        """Handle a message that came to the subject of operators' commands. Returns False for an unknown command."""
        try:
            control = decode_worker_control(message.data)
        except WireError:
            return False
        if not isinstance(control, OPERATORS):
            return False
        note_command(self._state, control)
        self._handle(control, message)
        return True

    def _handle(self, control: Record, message: Message) -> None:
        answer = self._handlers[type(control)](control, message.reply)
        if answer is not None:
            reply(self._messaging, message.reply, answer)

    def _on_encode(self, job: EncodeMedia, reply_to: str) -> MediaEncoded | None:
        if self._encoding is None or not self._state.taking:
            return MediaEncoded(ok=False, message=f"worker {self._state.worker} encodes nothing for others now")
        self._encoding.begin(job, lambda answer: reply(self._messaging, reply_to, answer))
        return None

    def _on_drain(self, control: Drain) -> Done:
        self._commands.begin_drain(control.grace_s)
        return Done(message=f"{len(self._state.runs)} runs to finish")

    def _on_dump(self) -> Done:
        refusal = self._inspector.ask_dump()
        return Done(ok=not refusal, message=refusal)
