"""Ends the jobs that a carrier holds: by the one compare-and-set of each, then the result, then the ack.

Nothing is acked before the job's result was seen. A carrier that lost its stream looks for an end there: if there is one, the
result is made from it, otherwise the message is left to the other carrier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.codec import encode
from headrace.broker.dead_letters import until_done
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import CarrierLost, JobRejected
from headrace.broker.durable.held_job import CarrierDeps, HeldJob, known
from headrace.broker.durable.names import JobRef, run_id
from headrace.broker.durable.results import ResultStore, answered, failed, fault_result, rejected
from headrace.broker.durable.stored_job import RenderedJob
from headrace.broker.durable.stream_writer import read_stream
from headrace.broker.errors import AdmissionError
from headrace.broker.messages.durable import JobResult, JobStatus, StreamEntry, Unreadable
from headrace.broker.messages.frames import JobFault, Row
from headrace.jetstream.errors import PayloadTooLarge
from headrace.jetstream.ports import Delivery

# Commits results of lines of batches together: those of some milliseconds leave in one write and are waited for once.
#
# No client waits for one of them alone. A result that is not stored at this first try is committed by itself, as any other
# is.


class JoinedCommits:
    """The results that wait for the next write. The first one that waits makes it, `gap_s` later, for all of them."""

    def __init__(self, results: ResultStore, gap_s: float) -> None:
        self._results = results
        self._gap_s = gap_s
        self._waiting: list[tuple[tuple[str, str, JobResult], asyncio.Future[bool]]] = []

    async def commit(self, tenant: str, token: str, result: JobResult) -> JobResult:
        """Store a result unless the job has one, and return the one that stands. It tries until it is cancelled."""
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(((tenant, token, result), stored))
        if len(self._waiting) == 1:
            await self._store()
        return result if await stored else await self._results.commit(tenant, token, result)

    async def _store(self) -> None:
        waiting = self._waiting
        done: list[bool] = []
        try:
            await asyncio.sleep(self._gap_s)
            self._waiting = []
            done = await self._results.store_all([result for result, _ in waiting])
        finally:  # if this one is cancelled or fails, each of the others is committed by itself
            if self._waiting is waiting:
                self._waiting = []
            for place, (_, stored) in enumerate(waiting):
                if not stored.done():
                    stored.set_result(place < len(done) and done[place])


log = structlog.get_logger()

READS_AFTER_A_LOSS = 3
MOST_BYTES = 64 * 1024  # of a job that its dead letter keeps
GATHER_S = 0.01  # for results of lines of batches, for which no client waits: they are stored together, and so are acks sent


class JobEnder:
    def __init__(self, deps: CarrierDeps) -> None:
        self._deps = deps
        self._retry_s = deps.settings.timing.retry_s
        self._lines = JoinedCommits(deps.results, GATHER_S)

    def settle(self, held: HeldJob, result: JobResult) -> None:
        """Ack a job whose result was seen, and tell of it."""
        held.delivery.ack()
        metrics.ENDED.labels(result.status).inc()
        if held.rendered is not None:
            held.rendered.settled()
        metrics.JOB_S.observe(max(0.0, self._deps.wall() - held.job.created))
        ref = held.ref
        self._deps.notices.finished(ref, result, held.job.reply)
        if ref.batch and self._deps.batches is not None:
            self._deps.batches.see(ref, result)
        told = log.debug if ref.batch else log.info  # what becomes of a batch is told by its owner
        told("job.finished", stored_job=ref.id, tenant=ref.tenant, status=result.status)

    async def end(
        self,
        held: HeldJob,
        status: JobStatus,
        *,
        rendered: RenderedJob | None = None,
        rows: Sequence[Row] = (),
        events: Sequence[bytes] = (),
        fault: JobFault | None = None,
    ) -> bool:
        """End a job. Returns True once its result was seen and it is acked, False if it is left to another carrier.

        `rows`, `events`: what the stream does not have yet.
        """
        result = self._result(held, status, rendered, fault)
        return await self.end_with(held, result, rows=rows, events=events, fault=fault)

    async def end_with(
        self,
        held: HeldJob,
        result: JobResult,
        *,
        rows: Sequence[Row] = (),
        events: Sequence[bytes] = (),
        fault: JobFault | None = None,
    ) -> bool:
        if held.job.durable:
            first = held.stored.events
            fields = {"status": result.status, "fault": fault, "first_event": first}
            try:
                try:
                    await held.writer.append("end", rows=list(rows), events=list(events), **fields)
                except PayloadTooLarge as error:
                    fault = JobFault("too_large", str(error))
                    result = fault_result(held.ref, "failed", fault, self._deps.wall())
                    await held.writer.append("end", status="failed", fault=fault, first_event=first)
            except CarrierLost:
                return await self.lost(held)
        results = self._lines if held.job.batch else self._deps.results
        self.settle(held, await results.commit(held.job.tenant, held.job.token, result))
        return True

    async def end_unreadable(self, held: HeldJob) -> None:
        """End a job whose stream cannot be read any more: no end can follow there, so only its result says so."""
        fault = JobFault("stream_gone", "parts of the answer were stored and are lost, so that it cannot be finished")
        result = fault_result(held.ref, "failed", fault, self._deps.wall())
        self.settle(held, await self._deps.results.commit(held.job.tenant, held.job.token, result))

    async def lost(self, held: HeldJob) -> bool:
        """Look for the end of a stream that another has written to. True if it has ended, and the job is acked."""
        for _ in range(READS_AFTER_A_LOSS):
            held.stored = await known(
                lambda: read_stream(self._deps.messaging, self._deps.subjects, held.job.tenant, held.job.token),
                what="stream",
                retry_s=self._retry_s,
            )
            if held.stored.end is not None:
                await self.commit_from_stream(held)
                return True
            if held.stored.last_seq > held.writer.last_seq:
                break
            await asyncio.sleep(self._retry_s)  # an old read
        metrics.LEFT.labels("lost").inc()
        log.warning("job.lost", stored_job=held.job.id, tenant=held.job.tenant)
        return False

    async def commit_from_stream(self, held: HeldJob) -> None:
        end = held.stored.end
        if end is None:
            raise ValueError(f"the stream of job {held.job.id!r} has no end")
        result = await self._result_of_stream(held, end)
        self.settle(held, await self._deps.results.commit(held.job.tenant, held.job.token, result))

    async def _result_of_stream(self, held: HeldJob, end: StreamEntry) -> JobResult:
        status = end.status or "failed"
        if status not in ("done", "failed"):
            return fault_result(held.ref, status, end.fault, self._deps.wall())
        wait_s = self._retry_s
        while True:
            try:
                rendered = held.rendered = await self._deps.renderer.render(held.job, run_id(held.job.id, held.nonce))
                for entry in held.stored.entries:
                    rendered.take(entry.rows)
                if status == "done":
                    await rendered.finish()
                    return answered(held.ref, rendered, self._deps.wall())
                rendered.fail(end.fault or JobFault("engine_error", "the job has failed"))
                return failed(held.ref, rendered, self._deps.wall())
            except JobRejected as error:
                return rejected(held.ref, error, self._deps.wall())
            except AdmissionError as error:
                log.info("job.retry", stored_job=held.job.id, what="result", error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, self._deps.settings.longest_retry_s)
            except HeadraceError as error:
                fault = JobFault("engine_error", str(error))
                return fault_result(held.ref, "failed", fault, self._deps.wall())

    def _result(self, held: HeldJob, status: JobStatus, rendered: RenderedJob | None, fault: JobFault | None) -> JobResult:
        if status == "done" and rendered is not None:
            return answered(held.ref, rendered, self._deps.wall())
        if status == "failed" and rendered is not None:
            return failed(held.ref, rendered, self._deps.wall())
        return fault_result(held.ref, status, fault, self._deps.wall())

    async def dead_letter(self, job: JobRef, delivery: Delivery, why: str) -> None:
        """Store a dead letter of a job that has no envelope, once, and retry until it is stored."""
        subjects = self._deps.subjects
        data = bytes(delivery.data[:MOST_BYTES])
        letter = encode(Unreadable(subject=delivery.subject, why=why, data=data, at=self._deps.wall()))
        subject = subjects.dlq(subjects.parse_job(delivery.subject).model_slug)

        async def publish() -> None:
            await self._deps.messaging.publish(subject, letter, msg_id=f"{job.id}.dlq")

        await until_done(publish, event="deadletter.retry", retry_s=self._retry_s, stored_job=job.id)
