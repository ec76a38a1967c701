"""Takes the messages that reach a worker: from judges, other workers and operators, and cancellations.

Operators' commands come to a subject of their own, which workers may not publish to; so do messages of other workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, decode_worker_command, decode_worker_control, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import (
    Abort,
    Answers,
    Done,
    Drain,
    Inspect,
    Inspection,
    KvDump,
    LoadAdapter,
    Ping,
    Since,
    UnloadAdapter,
)
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.operator import Operated
from headrace.broker.messages.prefill import PrefillCheck, PrefillDone, PrefillDrop, PrefillState, PrefillTaken, SetRole
from headrace.broker.messages.requests import EncodeMedia, MediaEncoded, Record
from headrace.broker.prefill_client import PrefillClient
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.protocol.run import RunState
from headrace.broker.worker.ports import EncodePort
from headrace.broker.worker.presence import Presence
from headrace.broker.worker.runs import WorkerRuns
from headrace.broker.worker.service import Service
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Message

OPERATORS = (Drain, SetRole, LoadAdapter, UnloadAdapter)
PEERS = (PrefillTaken, PrefillDone, PrefillCheck, PrefillDrop, Ping, EncodeMedia)

log = structlog.get_logger()


class Inbox:
    def __init__(
        self,
        deps: WorkerDeps,
        presence: Presence,
        runs: WorkerRuns,
        service: Service,
        client: PrefillClient,
        server: PrefillServer | None = None,
        encoding: EncodePort | None = None,
    ) -> None:
        self._deps = deps
        self._presence = presence
        self._runs = runs
        self._service = service
        self._server = server
        self._encoding = encoding
        # Each handler returns an answer, or None where there is none or it comes later.
        self._handlers: dict[type[Record], Callable[[Any, str], Record | None]] = {
            Answers: self._on_answers,
            Abort: self._on_abort,
            Since: self._on_since,
            PrefillTaken: lambda control, _: client.on_taken(control),
            PrefillDone: lambda control, _: client.on_done(control),
            PrefillCheck: self._on_prefill_check,
            PrefillDrop: self._on_prefill_drop,
            Drain: self._on_drain,
            SetRole: lambda it, reply_to: service.begin_role(it.role, it.grace_s, self._answerer(reply_to)),
            LoadAdapter: lambda control, reply_to: service.begin_adapter(control, self._answerer(reply_to)),
            UnloadAdapter: lambda control, reply_to: service.begin_adapter(control, self._answerer(reply_to)),
            EncodeMedia: self._on_encode,
            KvDump: lambda _, __: self._on_dump(),
            Ping: lambda _, __: Done(),
            Inspect: lambda _, __: self._inspect(),
        }

    async def subscribe(self) -> None:
        messaging, subjects = self._deps.messaging, self._deps.subjects
        pool, worker = self._presence.pool, self._presence.worker
        await messaging.subscribe(subjects.own_control(worker), self.on_control)
        await messaging.subscribe(subjects.peer(pool, worker), self.on_peer)
        await messaging.subscribe(subjects.operate_worker(pool, worker), self.on_operator)
        await messaging.subscribe(subjects.find(pool), self.on_control)
        await messaging.subscribe(subjects.cancel(pool), self.on_cancel)

    def on_control(self, message: Message) -> None:
        """Handle a message of a judge or a router."""
        if (control := self._decoded(message)) is None:
            return
        if isinstance(control, OPERATORS):
            metrics.MALFORMED.labels("control").inc()
            log.warning("command.refused", kind=type(control).__name__, reason="it did not come to the subject of commands")
            refusal = Done(ok=False, message="commands are taken at the subject of commands only")
            self._reply(message.reply, refusal)
            return
        self._handle(control, message)

    def on_peer(self, message: Message) -> None:
        """Handle a message of another worker. What only judges and routers may say is counted and logged."""
        if (control := self._decoded(message)) is None:
            return
        if not isinstance(control, PEERS):
            metrics.FORGED.labels("control").inc()
            log.warning("message.forged", kind=type(control).__name__, reason="a worker may not say that to another one")
            return
        self._handle(control, message)

    def on_operator(self, message: Message) -> None:
        """Handle a command of an operator."""
        try:
            control = decode_worker_control(message.data)
        except WireError:
            control = None
        if isinstance(control, OPERATORS):
            self._presence.note_command(control)
            self._handle(control, message)
            return
        try:
            command = decode_worker_command(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("command").inc()
            log.error("command.malformed", error=str(error))
            self._reply(message.reply, Operated(ok=False, message=str(error)))
            return
        self._service.begin(command, self._answerer(message.reply))

    def on_cancel(self, message: Message) -> None:
        """Drop the runs of cancelled requests, and remember their ids for copies that are still on their way."""
        try:
            ids = decode(Cancel, message.data).ids
        except WireError as error:
            metrics.MALFORMED.labels("cancel").inc()
            log.error("cancel.malformed", error=str(error))
            return
        now, table = asyncio.get_running_loop().time(), self._runs.table
        for request_id in ids:
            self._runs.tombstones.add(request_id, now)
            for run in table.of(request_id) or table.of_job(request_id):
                self._runs.drop(run, how="cancelled")

    def _decoded(self, message: Message) -> Record | None:
        try:
            return decode_worker_control(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("control").inc()
            log.error("control.malformed", error=str(error))
            return None

    def _handle(self, control: Record, message: Message) -> None:
        if (answer := self._handlers[type(control)](control, message.reply)) is not None:
            self._reply(message.reply, answer)

    def _reply(self, subject: str, answer: Record) -> None:
        if subject:
            self._deps.messaging.send(subject, encode(answer))

    def _answerer(self, subject: str) -> Callable[[Record], None]:
        return lambda answer: self._reply(subject, answer)

    # -- judges --------------------------------------------------------------------------------------------------

    def _on_answers(self, control: Answers, _: str) -> None:
        for answer in control.answers:
            for run in self._runs.table.of(answer.id):
                if (run.attempt, run.run) != (answer.attempt, answer.run):
                    continue
                if answer.verdict != "done" or run.state is RunState.ENDED:
                    self._runs.drop(run, how=answer.verdict)

    def _on_abort(self, control: Abort, _: str) -> None:
        """Drop the named runs. Without a tombstone: the good run of the same request must live."""
        for ref in control.runs:
            if (run := self._runs.table.find(ref)) is not None:
                self._runs.drop(run, how="stale")

    def _on_since(self, control: Since, _: str) -> None:
        for item in control.items:
            for run in self._runs.table.of(item.id):
                self._runs.outbox.resend(run, item.offsets)

    # -- other workers -------------------------------------------------------------------------------------------

    def _on_prefill_check(self, control: PrefillCheck, _: str) -> PrefillState:
        return PrefillState(state="unknown") if self._server is None else self._server.check(control.job)

    def _on_prefill_drop(self, control: PrefillDrop, _: str) -> None:
        """Drop jobs that the decode worker wants no more."""
        if self._server is not None:
            for job in control.jobs:
                self._server.drop(job)

    def _on_encode(self, job: EncodeMedia, reply_to: str) -> MediaEncoded | None:
        if self._encoding is None or not self._presence.taking:
            return MediaEncoded(ok=False, message=f"worker {self._presence.worker} encodes nothing for others now")
        self._encoding.begin(job, self._answerer(reply_to))
        return None

    # -- operators -----------------------------------------------------------------------------------------------

    def _on_drain(self, control: Drain, _: str) -> Done:
        self._service.begin_drain(control.grace_s)
        return Done(message=f"{len(self._runs.table)} runs to finish")

    def _on_dump(self) -> Done:
        kv = self._presence.kv
        refusal = f"worker {self._presence.worker} publishes no cache events" if kv is None else kv.ask_dump()
        return Done(ok=not refusal, message=refusal)

    def _inspect(self) -> Inspection:
        presence, table = self._presence, self._runs.table
        states = self._server.states() if self._server is not None else {}
        for run in table:
            states[run.state.value] = states.get(run.state.value, 0) + 1
        return Inspection(
            component=presence.worker,
            runs=[run.ref for run in table],
            states=states,
            lease_held=presence.lease.held,
            draining=presence.draining,
            kv=presence.kv.state if presence.kv is not None else "",
        )
