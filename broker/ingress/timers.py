"""Periodic checks of an ingress: deadlines, slow clients, and streams without frames."""

from __future__ import annotations

import asyncio

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.deadline_texts import never_started, unfinished
from headrace.broker.ingress.cancellation import Canceller
from headrace.broker.ingress.open_jobs import OpenJob, OpenJobs
from headrace.broker.messages import JobFault, Since, SinceItem
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.settings import IngressSettings
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

TICK_S = 0.25


class IngressTimers:
    """Ends requests that are too late or not read, and asks for the tokens of silent ones."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        open_jobs: OpenJobs,
        canceller: Canceller,
        *,
        settings: IngressSettings,
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._judge = judge
        self._open = open_jobs
        self._canceller = canceller
        self._settings = settings

    async def run(self) -> None:
        """Check all open requests every `TICK_S` until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._forget_ended()
            self._end_overdue(now)
            self._ask_pools(self._judge.silent(now, self._settings.timing.silence_s), cause="silence")
            metrics.OPEN.set(len(self._judge))

    async def on_reconnect(self) -> None:
        """Ask for the missing tokens of every open request, because frames may have been lost."""
        self._ask_pools(list(self._judge), cause="reconnect")

    def _forget_ended(self) -> None:
        for job in self._open:
            if self._judge.get(job.id) is None:
                self._open.remove(job.id)

    def _end_overdue(self, now_s: float) -> None:
        """End the requests whose deadline has passed, and those that have been paused for too long."""
        for job in self._open:
            paused_s = job.stream.paused_since_s
            if now_s >= job.deadline_s:
                fault = JobFault("deadline_exceeded", self._missed(job), retriable=True)
                self._canceller.end(job.id, fault, cause="deadline")
            elif paused_s is not None and now_s - paused_s > self._settings.slow_client_s:
                fault = JobFault("slow_client", "the stream was not read in time")
                self._canceller.end(job.id, fault, cause="slow_client")

    def _missed(self, job: OpenJob) -> str:
        envelope = job.envelope()
        after_s = envelope.deadline - envelope.created
        record = self._judge.get(job.id)
        if record is None or (record.run is None and not record.held):
            return never_started(after_s)
        return unfinished(after_s, sum(len(ids) for ids in record.emitted))

    def _ask_pools(self, records: list[JobRecord], *, cause: str) -> None:
        """Ask all workers of each pool: a stream may be silent because another worker than the one known here has it."""
        by_pool: dict[str, list[SinceItem]] = {}
        for record in records:
            by_pool.setdefault(record.pool, []).append(record.offsets())
        for pool, items in by_pool.items():
            metrics.GAPS.labels(cause).inc(len(items))
            self._messaging.send(self._subjects.find(pool), encode(Since(items=items)))
