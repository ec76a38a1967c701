"""Ends stored messages that are no jobs: with a result that says why, and a dead letter, never by redelivery without end."""

from __future__ import annotations

import structlog

from headrace.broker.codec import encode
from headrace.broker.dead_letters import MOST_BYTES
from headrace.broker.durable.carrier.carrier_deps import CarrierDeps
from headrace.broker.durable.carrier.job_end import JobEnder
from headrace.broker.durable.errors import StreamIncomplete
from headrace.broker.durable.names import LONGEST_NAME, JobRef
from headrace.broker.durable.results import without_answer
from headrace.broker.durable.stored_job import name_of
from headrace.broker.failed_deliveries import note_failure
from headrace.broker.messages import HEADER_BATCH, HEADER_CUSTOM_ID, HEADER_STREAM, JobFault, Unreadable
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.ports import Delivery
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

UNKNOWN_POOL = "unknown"  # the subject of dead letters of jobs whose subject cannot be read


class MalformedJobs:
    """Ends malformed jobs in background tasks, one per stored message."""

    def __init__(self, deps: CarrierDeps, ender: JobEnder, tasks: TaskScope) -> None:
        self._deps = deps
        self._ender = ender
        self._tasks = tasks
        self._ending: set[int] = set()  # stored sequences

    def end(self, delivery: Delivery, why: str) -> None:
        """End a message that cannot be read as a job. `why` names what is wrong with it."""
        seq = delivery.stream_seq
        if seq not in self._ending:
            self._ending.add(seq)
            self._tasks.spawn_guarded(self._end(delivery, why), lambda error: self._not_ended(delivery, error))

    def _not_ended(self, delivery: Delivery, error: Exception) -> None:
        """Leave a message whose end fails to its redelivery, which is slow."""
        self._ending.discard(delivery.stream_seq)
        note_failure("job", error, seq=delivery.stream_seq)

    async def _end(self, delivery: Delivery, why: str) -> None:
        try:
            tenant = self._deps.subjects.parse_job(delivery.subject).tenant
        except SubjectError as error:  # no result can be stored for it
            letter = Unreadable(subject=delivery.subject, why=why, data=bytes(delivery.data[:MOST_BYTES]), at=self._deps.wall())
            self._deps.messaging.send(self._deps.subjects.dlq(UNKNOWN_POOL), encode(letter))
            log.error("job.malformed", seq=delivery.stream_seq, error=str(error)[:300])
            delivery.ack()
            return
        job = job_ref(delivery, tenant)
        log.error("job.malformed", stored_job=job.id, tenant=job.tenant, seq=delivery.stream_seq, error=why)
        try:
            result = without_answer(job, "malformed", self._deps.wall(), why)
            await self._deps.ends.end(job, result, JobFault("malformed", why))
            await self._ender.dead_letter(job, delivery, why)
            delivery.ack()
            self._deps.notices.finished(job, result)
        except StreamIncomplete as error:
            log.error("stream.incomplete", stored_job=job.id, tenant=job.tenant, error=str(error))
        finally:
            self._ending.discard(delivery.stream_seq)


def job_ref(delivery: Delivery, tenant: str) -> JobRef:
    """Return what a message says that it is, as far as that can be read."""
    headers = delivery.headers
    name = name_of(headers, delivery.stream_seq)[:LONGEST_NAME]
    return JobRef(
        tenant=tenant,
        name=name,
        durable=headers.get(HEADER_STREAM) == "1",
        batch=headers.get(HEADER_BATCH, ""),
        custom_id=headers.get(HEADER_CUSTOM_ID, ""),
    )
