"""Stores jobs of clients and reads what has become of them, for those who are no carriers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace.broker.codec import encode
from headrace.broker.durable.names import JobRef
from headrace.broker.durable.quota import QueueQuotas
from headrace.broker.durable.reader import EventFollow, JobReader
from headrace.broker.durable.results import TEXTS, OutsideEnds, ResultStore, without_answer
from headrace.broker.durable.stored_job import JobPublisher, NewJob
from headrace.broker.messages.durable import JobResult, JobStatus, ResultResponse
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.frames import JobFault
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

# Cancels stored jobs: tells their carriers, then writes the end itself unless there is one.
#
# A canceller need not know whether a job is plain or durable: it writes the end of the stream first, and then the result. Of
# a plain job only the result decides, and a carrier that meets the entry makes the same result.

log = structlog.get_logger()

CARRIER_FIRST_S = 0.3  # time in which the carrier of a job ends it itself, a durable stream with the rows that it has


class JobCanceller:
    def __init__(self, messaging: Messaging, subjects: Subjects, *, wall: Callable[[], float]) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._ends = OutsideEnds(messaging, subjects, ResultStore(messaging, subjects), wall=wall)
        self._wall = wall

    async def cancel(self, tenant: str, name: str) -> JobStatus:
        """Cancel a job, and return the status that stands, which is another one if the job had ended before.

        It tries until it is cancelled. Raises StreamIncomplete for a stream that has lost entries.
        """
        job = JobRef(tenant=tenant, name=name)
        self._messaging.send(self._subjects.cancel_jobs(), encode(Cancel(ids=[job.id])))
        await asyncio.sleep(CARRIER_FIRST_S)
        result = without_answer(job, "cancelled", self._wall())
        status = await self._ends.end_either(job, result, JobFault("cancelled", TEXTS["cancelled"]))
        log.info("job.cancelled", stored_job=job.id, tenant=job.tenant, status=status)
        return status


class StoredJobs:
    """The jobs of all tenants. A job is named by its tenant and its token."""

    def __init__(self, messaging: Messaging, subjects: Subjects, quotas: QueueQuotas | None = None) -> None:
        """`quotas` None = only the stream's own caps hold."""
        self._quotas = quotas
        self._publisher = JobPublisher(messaging, subjects)
        self._reader = JobReader(messaging, subjects)
        self._results = ResultStore(messaging, subjects)
        self._canceller = JobCanceller(messaging, subjects, wall=time.time)

    async def publish(self, job: NewJob) -> None:
        """Store a job. Raises Overloaded, RequestTooLarge, BrokerUnavailable, after which it may be stored all the same."""
        if self._quotas is not None:
            await self._quotas.check(job.tenant, len(job.body))
        await self._publisher.publish(job)

    def events(self, tenant: str, token: str, *, first: int = 0) -> EventFollow:
        """Return a reader of a job's events from number `first` on."""
        return self._reader.events(tenant, token, first=first)

    async def begun(self, tenant: str, token: str) -> bool:
        return await self._reader.begun(tenant, token)

    async def known(self, tenant: str, token: str) -> JobResult | None:
        return await self._results.get(tenant, token)

    async def result(self, tenant: str, token: str) -> JobResult:
        return await self._reader.result(tenant, token)

    async def response(self, result: JobResult) -> ResultResponse | None:
        return await self._results.response(result)

    async def drop(self, result: JobResult) -> None:
        """Delete the object of a result that has one; the result itself stays. Raises JetStreamError."""
        await self._results.drop(result)

    async def cancel(self, tenant: str, token: str) -> None:
        """Cancel a job that a frontend named, and return once it has an end. It tries until it is cancelled."""
        await self._canceller.cancel(tenant, token)
