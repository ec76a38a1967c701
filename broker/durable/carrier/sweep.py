"""Sweeps the stored jobs that no carrier may ever take: overdue ones, and those of models that are not known.

A pool without capacity has no carrier. A process that needs the end of one job may write it; the sweep does so for all jobs of
such pools, slowly, and removes what has its result.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import structlog

from headrace.broker.durable import metrics
from headrace.broker.durable.carrier.carrier_deps import CarrierDeps
from headrace.broker.durable.errors import JobMalformed, StreamIncomplete
from headrace.broker.durable.results import TEXTS, refused, without_answer
from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.failed_deliveries import note_failure
from headrace.broker.messages import JobFault, JobResult
from headrace.jetstream.errors import JetStreamError, SubjectError
from headrace.jetstream.ports import StoredMessage

log = structlog.get_logger()

PAGE = 200  # jobs that are read at once
PAGES = 10  # of each subject in one sweep: a long queue is read in several
REST_S = 0.05  # between two pages, so that a long queue does not keep the event loop busy


def verdict(job: StoredJob, *, known: bool, now: float, margin_s: float, unknown_model_s: float) -> JobResult | None:
    """Return the result of a job that is to be ended from outside, None for one that may still be carried. Pure.

    `known`: its model has a card here. `now` is Unix time.
    """
    if now >= job.deadline + margin_s:
        return without_answer(job.ref, "expired", now)
    if not known and now >= job.created + unknown_model_s:
        message = "No model of this name is served here."
        return refused(job.ref, status_code=404, code="model_not_found", message=message, now=now)
    return None


class JobSweeper:
    """Sweeps the stream of jobs while this ingress holds its lease."""

    def __init__(self, deps: CarrierDeps, carried: Callable[[str], bool]) -> None:
        """`carried(slug)`: there are workers for the jobs of this model, so that carriers reach all of them."""
        self._deps = deps
        self._carried = carried
        self._stream = deps.subjects.stream("JOB")
        self._cursors: dict[str, int] = {}  # by subject: the sequence at which the next sweep goes on

    async def run(self) -> None:
        """Sweep until cancelled. Several carriers sweep at different times; what one has ended the others find removed."""
        while True:
            await asyncio.sleep(self._deps.settings.sweep_s * (0.5 + random.random()))  # noqa: S311 - it spreads the load
            if self._deps.ingress.lease_held:
                try:
                    await self.sweep()
                except JetStreamError as error:
                    log.info("jobs.not_swept", error=str(error))

    async def sweep(self) -> None:
        """Look at a stretch of the jobs of each model that has no workers. Raises JetStreamError."""
        subjects = self._deps.subjects
        counts = await self._deps.messaging.subject_counts(self._stream, subjects.all_jobs())
        for subject in sorted(counts):
            try:
                slug = subjects.parse_job(subject).model_slug
            except SubjectError as error:  # nothing reads there, and it must not keep the sweep from the others
                log.error("jobs.unknown_subject", error=str(error)[:300])
                continue
            if not self._carried(slug):
                await self._sweep_subject(subject)
        self._cursors = {subject: seq for subject, seq in self._cursors.items() if subject in counts}

    async def _sweep_subject(self, subject: str) -> None:
        """Read some pages from where the last sweep stopped, and begin anew after the last one."""
        for _ in range(PAGES):
            seq = self._cursors.get(subject, 1)
            page = await self._deps.messaging.subject_messages(self._stream, subject, limit=PAGE, start_seq=seq)
            for message in page:
                try:
                    await self._look(message)
                except JetStreamError:
                    raise
                except Exception as error:  # a job that nothing foresaw must not keep the sweep from the others
                    note_failure("sweep", error, seq=message.seq)
            if len(page) < PAGE:
                self._cursors.pop(subject, None)
                return
            self._cursors[subject] = page[-1].seq + 1
            await asyncio.sleep(REST_S)

    async def _look(self, message: StoredMessage) -> None:
        deps = self._deps
        subject = deps.subjects.parse_job(message.subject)
        try:
            job = parse_job(message.data, message.headers or {}, tenant=subject.tenant, seq=message.seq, stored=message.at)
        except JobMalformed:  # its carrier ends it
            return
        settings = deps.settings
        result = verdict(
            job,
            known=deps.renderer.serves(subject.model_slug),
            now=deps.wall(),
            margin_s=settings.margin_s,
            unknown_model_s=settings.unknown_model_s,
        )
        if result is None:
            return
        text = TEXTS["expired"] if result.status == "expired" else "no model of this name is served"
        fault = JobFault("deadline_exceeded" if result.status == "expired" else "model_not_found", text)
        try:
            status = await deps.ends.end(job.ref, result, fault)
        except StreamIncomplete as error:
            log.error("stream.incomplete", stored_job=job.id, tenant=job.tenant, error=str(error))
            return
        metrics.SWEPT.labels(status).inc()
        log.warning("job.swept", stored_job=job.id, tenant=job.tenant, status=status)
        stands = await deps.results.get(job.tenant, job.token)
        if stands is None and status == result.status == "failed":  # an earlier sweeper died here, and the model has no carrier
            stands = await deps.results.commit(job.tenant, job.token, result)
        if stands is not None:  # of a stream that had ended well its carrier makes the result
            await deps.messaging.delete_message(self._stream, message.seq)
            deps.notices.finished(job.ref, stands, job.reply)
