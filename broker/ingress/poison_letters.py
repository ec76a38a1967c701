"""Stores a dead letter for each request that is poison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from headrace.broker.dead_letters import store_dead_letter
from headrace.broker.ingress.open_jobs import OpenJobs
from headrace.broker.log_ids import log_ids
from headrace.broker.messages import DeadLetter, HistoryEntry
from headrace.broker.protocol.crashes import Crash
from headrace.broker.protocol.job_record import JobRecord
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


class PoisonLetters:
    """Writes the dead letters of one ingress's requests in background tasks."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        open_jobs: OpenJobs,
        tasks: TaskScope,
        *,
        retry_s: float,
        wall: Callable[[], float],
    ) -> None:
        """`wall` gives Unix time."""
        self._messaging = messaging
        self._subjects = subjects
        self._open = open_jobs
        self._tasks = tasks
        self._retry_s = retry_s
        self._wall = wall

    def store(self, record: JobRecord, crashes: Sequence[Crash]) -> None:
        """Store the dead letter of a request, with the crashes that count against it, and retry until it is stored."""
        job = self._open.get(record.id)
        if job is None or not self._tasks.is_open:
            return
        history = [HistoryEntry(crash.attempt, crash.worker, crash.group) for crash in crashes]
        log.error(
            "job.poisoned",
            **log_ids(job),
            crashes=len(crashes),
            history=[[h.attempt, h.worker, h.group] for h in history],
        )
        letter = DeadLetter(envelope=job.envelope(), reason="poison", attempt=record.attempt, history=history, at=self._wall())
        self._tasks.spawn(store_dead_letter(self._messaging, self._subjects, letter, retry_s=self._retry_s))
