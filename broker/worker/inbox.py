"""What reaches a worker: judges' answers, aborts and questions, cancellations, and operators' commands."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, decode_worker_control, encode
from headrace.broker.errors import WireError
from headrace.broker.messages import Abort, Answers, Cancel, Done, Drain, KvDump, LoadAdapter, Ping, Since, UnloadAdapter
from headrace.broker.messages.prefill import PrefillCheck, PrefillDone, PrefillDrop, PrefillState, PrefillTaken, SetRole
from headrace.broker.protocol.run import RunState
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.ports import Message

if TYPE_CHECKING:
    from headrace.broker.worker.session import WorkerSession

log = structlog.get_logger()


class WorkerInbox:
    """Turns messages into calls on the session."""

    def __init__(self, session: WorkerSession, tombstones: Tombstones) -> None:
        self._session = session
        self._tombstones = tombstones

    def on_control(self, message: Message) -> None:
        try:
            control = decode_worker_control(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("control").inc()
            log.error("control.malformed", error=str(error))
            return
        if isinstance(control, Answers):
            self._on_answers(control)
        elif isinstance(control, Abort):
            self._on_abort(control)
        elif isinstance(control, Since):
            self._on_since(control)
        elif isinstance(control, Drain):
            self._session.operating.begin_drain(control.grace_s)
            self._session.reply(message.reply, encode(Done(message=f"{len(self._session.runs)} runs to finish")))
        elif isinstance(control, Ping):
            self._session.reply(message.reply, encode(Done()))
        elif isinstance(control, KvDump):
            refusal = self._session.operating.ask_dump()
            self._session.reply(message.reply, encode(Done(ok=not refusal, message=refusal)))
        elif isinstance(control, PrefillTaken | PrefillDone | PrefillCheck | PrefillDrop):
            self._on_prefill(control, message.reply)
        elif isinstance(control, LoadAdapter | UnloadAdapter):
            self._session.operating.begin_adapter(control, message.reply)
        elif isinstance(control, SetRole):
            self._session.operating.begin_role(control.role, control.grace_s, message.reply)
        else:
            self._session.reply(message.reply, encode(self._session.operating.inspect()))

    def _on_prefill(self, control: PrefillTaken | PrefillDone | PrefillCheck | PrefillDrop, reply: str) -> None:
        client, server = self._session.prefill_client, self._session.prefill_server
        if isinstance(control, PrefillTaken):
            self._session.reply(reply, encode(client.on_taken(control)))
        elif isinstance(control, PrefillDone):
            self._session.reply(reply, encode(client.on_done(control)))
        elif isinstance(control, PrefillCheck):
            state = PrefillState(state="unknown") if server is None else server.check(control.job)
            self._session.reply(reply, encode(state))
        elif server is not None:
            for job in control.jobs:
                server.drop(job)

    def on_cancel(self, message: Message) -> None:
        try:
            ids = decode(Cancel, message.data).ids
        except WireError as error:
            metrics.MALFORMED.labels("cancel").inc()
            log.error("cancel.malformed", error=str(error))
            return
        now = asyncio.get_running_loop().time()
        for request_id in ids:
            self._tombstones.add(request_id, now)
            for run in self._session.runs.of(request_id):
                self._session.drop(run, how="cancelled")

    def _on_answers(self, control: Answers) -> None:
        for answer in control.answers:
            for run in self._session.runs.of(answer.id):
                if (run.attempt, run.run) != (answer.attempt, answer.run):
                    continue
                if answer.verdict != "done" or run.state is RunState.ENDED:
                    self._session.drop(run, how=answer.verdict)

    def _on_abort(self, control: Abort) -> None:
        """Names runs, not requests, and sets no tombstone: the good run of the same request must live."""
        for ref in control.runs:
            run = self._session.runs.find(ref)
            if run is not None:
                self._session.drop(run, how="stale")

    def _on_since(self, control: Since) -> None:
        for item in control.items:
            for run in self._session.runs.of(item.id):
                self._session.resend(run, item.offsets)
