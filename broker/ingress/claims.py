"""Decides workers' claims, after fresh reads of the leases of those workers that are suspected to have crashed."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker.ingress.judge_outbox import JudgeOutbox
from headrace.broker.membership.members import Members, drained_key
from headrace.broker.messages import Claim, ClaimReply
from headrace.broker.protocol.crashes import base_worker
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


class ClaimDecider:
    """Answers claims: those without suspects at once, the others when the suspects' leases have been read."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        outbox: JudgeOutbox,
        members: Members,
        tasks: TaskScope,
    ) -> None:
        self._subjects = subjects
        self._judge = judge
        self._outbox = outbox
        self._members = members
        self._tasks = tasks
        self._leases = messaging.bucket(subjects.bucket("members"))
        self._state = messaging.bucket(subjects.bucket("state"))
        self._loop = asyncio.get_running_loop()

    def on_claim(self, claim: Claim, reply: str) -> None:
        """Answer `claim` on the subject `reply`, now or from a task. A worker repeats a claim that gets no answer."""
        record = self._judge.get(claim.id)
        if record is None:
            self._outbox.reply(reply, ClaimReply(verdict="unknown"))
        elif not claim.history and not record.history:
            self._decide(claim, reply, set())
        elif self._tasks.is_open:
            history = (*claim.history, *record.history)
            suspects = sorted({entry.worker for entry in history if base_worker(entry.worker) == entry.worker})
            self._tasks.spawn(self._decide_suspected(claim, reply, record.pool, suspects))

    async def _decide_suspected(self, claim: Claim, reply: str, pool: str, suspects: list[str]) -> None:
        try:
            found = await asyncio.gather(*(self._accounted(pool, worker) for worker in suspects))
        except JetStreamError as error:  # no answer: the worker asks again
            log.warning("claim.undecided", request_id=claim.id, error=str(error))
            return
        self._decide(claim, reply, {worker for worker, accounted in zip(suspects, found, strict=True) if accounted})

    async def _accounted(self, pool: str, worker: str) -> bool:
        """Read from the server whether this process is live under the same identity or has announced a drain."""
        if await self._leases.get(self._subjects.worker_key(pool, worker)) is not None:
            return True
        return await self._state.get(drained_key(worker)) is not None

    def _decide(self, claim: Claim, reply: str, accounted: set[str]) -> None:
        record = self._judge.get(claim.id)
        pool = record.pool if record is not None else ""
        verdict = self._judge.on_claim(
            claim,
            self._loop.time(),
            accounted=accounted.__contains__,
            alive=lambda worker: self._members.worker_live(pool, worker),
        )
        self._outbox.reply(reply, verdict)
