"""What reaches an ingress: token frames, workers' claims, checks and refusals, and the pool's events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, decode_ingress_control, encode
from headrace.broker.errors import WireError
from headrace.broker.ingress.judge_outbox import JudgeOutbox
from headrace.broker.ingress.placement_decisions import Decisions
from headrace.broker.membership.members import Members
from headrace.broker.messages import CancelJob, Check, Claim, ClaimReply, Done, Frame, JobEvents, Record
from headrace.broker.protocol.crashes import base_worker
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


def drained_key(worker: str) -> str:
    """Key in the state bucket: this worker announced that it drains. Outlives its lease."""
    return f"drained.{worker}"


class IngressInbox:
    """Feeds the judge and sends what it answers."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        outbox: JudgeOutbox,
        members: Members,
        decisions: Decisions,
        *,
        bucket: str,
        cancel: Callable[[str, str], int],
    ) -> None:
        """`cancel(name, tenant)` ends what is open under that name and says how many these were."""
        self._cancel = cancel
        self._messaging = messaging
        self._subjects = subjects
        self._judge = judge
        self._outbox = outbox
        self._members = members
        self._decisions = decisions
        self._state = messaging.bucket(bucket)
        self._loop = asyncio.get_running_loop()
        self.tasks: asyncio.TaskGroup | None = None

    def on_frame(self, message: Message) -> None:
        try:
            frame = decode(Frame, message.data)
        except WireError as error:
            metrics.MALFORMED.labels("frame").inc()
            log.error("frame.malformed", error=str(error))
            return
        self._judge.on_frame(frame, self._loop.time())
        self._outbox.flush()

    def on_events(self, message: Message) -> None:
        try:
            events = decode(JobEvents, message.data).events
        except WireError as error:
            metrics.MALFORMED.labels("event").inc()
            log.error("event.malformed", error=str(error))
            return
        for event in events:
            self._judge.on_event(event)
            self._decisions.on_event(event)

    def on_control(self, message: Message) -> None:
        try:
            control = decode_ingress_control(message.data)
        except WireError as error:
            metrics.MALFORMED.labels("control").inc()
            log.error("control.malformed", error=str(error))
            return
        if isinstance(control, Claim):
            self._on_claim(control, message.reply)
        elif isinstance(control, Check):
            self._reply(message.reply, self._judge.on_check(control, self._loop.time()))
        elif isinstance(control, CancelJob):
            self._reply(message.reply, Done(ok=self._cancel(control.name, control.tenant) > 0))
        else:
            self._reply(message.reply, self._judge.on_refuse(control))

    def _on_claim(self, claim: Claim, reply: str) -> None:
        record = self._judge.get(claim.id)
        if record is None:
            self._reply(reply, ClaimReply(verdict="unknown"))
        elif not claim.history and not record.history:
            self._decide(claim, reply, set())
        elif self.tasks is not None:
            history = (*claim.history, *record.history)
            suspects = sorted({entry.worker for entry in history if base_worker(entry.worker) == entry.worker})
            self.tasks.create_task(self._decide_suspected(claim, reply, record.pool, suspects))

    async def _decide_suspected(self, claim: Claim, reply: str, pool: str, suspects: list[str]) -> None:
        try:
            answers = await asyncio.gather(*(self._accounted(pool, worker) for worker in suspects))
        except JetStreamError as error:  # no answer: the worker asks again
            log.warning("claim.undecided", request_id=claim.id, error=str(error))
            return
        self._decide(claim, reply, {worker for worker, answer in zip(suspects, answers, strict=True) if answer})

    async def _accounted(self, pool: str, worker: str) -> bool:
        """Fresh reads: is this process live under the same identity, or did it announce a drain?"""
        members = self._messaging.bucket(self._subjects.bucket("members"))
        if await members.get(self._subjects.worker_key(pool, worker)) is not None:
            return True
        return await self._state.get(drained_key(worker)) is not None

    def _decide(self, claim: Claim, reply: str, accounted: set[str]) -> None:
        record = self._judge.get(claim.id)
        pool = record.pool if record is not None else ""
        self._reply(
            reply,
            self._judge.on_claim(
                claim,
                self._loop.time(),
                accounted=accounted.__contains__,
                alive=lambda worker: self._members.worker_live(pool, worker),
            ),
        )

    def _reply(self, subject: str, reply: Record) -> None:
        self._outbox.flush()
        if subject:
            self._messaging.send(subject, encode(reply))
