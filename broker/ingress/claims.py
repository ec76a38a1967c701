"""Decides workers' claims, after fresh reads of the leases of those workers that are suspected to have crashed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

import structlog

from headrace.broker.failed_deliveries import note_failure
from headrace.broker.ingress.judge_outbox import JudgeOutbox
from headrace.broker.membership.members import Members, drained_key
from headrace.broker.messages import Claim, ClaimReply, HistoryEntry, Suspicion, SuspicionQuery
from headrace.broker.protocol.crashes import base_worker
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

Decide = Callable[[Collection[str]], None]


class ClaimDecider:
    """Answers claims and suspicion queries: at once, or when the leases of workers that may have crashed have been read."""

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
        else:
            self._when_read(record, claim.history, lambda accounted: self._decide(claim, reply, accounted))

    def on_suspicion(self, query: SuspicionQuery, reply: str) -> None:
        """Answer `query` on the subject `reply`, now or from a task."""
        record = self._judge.get(query.id)
        if record is None:
            self._outbox.reply(reply, Suspicion())
        else:
            self._when_read(record, query.history, lambda accounted: self._tell(query, reply, accounted))

    def _when_read(self, record: JobRecord, history: Iterable[HistoryEntry], decide: Decide) -> None:
        """Read the leases of those that may have crashed, then call `decide` with those of them that have not."""
        entries = (entry for entry in (*history, *record.history) if entry.attempt >= record.cleared)
        suspects = sorted({entry.worker for entry in entries if base_worker(entry.worker) == entry.worker})
        if not suspects:
            decide(frozenset())
        elif self._tasks.is_open:
            self._tasks.spawn_guarded(self._read(record, suspects, decide), lambda error: note_failure("claim", error))

    async def _read(self, record: JobRecord, suspects: list[str], decide: Decide) -> None:
        try:
            found = await asyncio.gather(*(self._accounted(record.pool, worker) for worker in suspects))
        except JetStreamError as error:  # no answer: the worker or router asks again
            log.warning("claim.undecided", request_id=record.id, error=str(error))
            return
        decide(frozenset(worker for worker, accounted in zip(suspects, found, strict=True) if accounted))

    async def _accounted(self, pool: str, worker: str) -> bool:
        """Read from the server whether this process is live under the same identity or has announced a drain."""
        if await self._leases.get(self._subjects.worker_key(pool, worker)) is not None:
            return True
        return await self._state.get(drained_key(worker)) is not None

    def _decide(self, claim: Claim, reply: str, accounted: Collection[str]) -> None:
        record = self._judge.get(claim.id)
        pool = record.pool if record is not None else ""
        verdict = self._judge.on_claim(
            claim,
            self._loop.time(),
            accounted=accounted.__contains__,
            alive=lambda worker: self._members.worker_live(pool, worker),
        )
        self._outbox.reply(reply, verdict)

    def _tell(self, query: SuspicionQuery, reply: str, accounted: Collection[str]) -> None:
        self._outbox.reply(reply, self._judge.on_suspicion(query, accounted=accounted.__contains__))
