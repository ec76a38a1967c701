"""Stores jobs of clients and reads what has become of them, for those who are no carriers."""

from __future__ import annotations

import time

from headrace.broker.durable.cancel import JobCanceller
from headrace.broker.durable.publisher import JobPublisher, NewJob
from headrace.broker.durable.queue_quotas import QueueQuotas
from headrace.broker.durable.reader import EventFollow, JobReader
from headrace.broker.durable.result_store import ResultStore
from headrace.broker.messages import JobResult, ResultResponse
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


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
        """Return whether entries of a job are seen. Raises JetStreamError."""
        return await self._reader.begun(tenant, token)

    async def known(self, tenant: str, token: str) -> JobResult | None:
        """Return the result of a job, None if none is seen. Raises JetStreamError."""
        return await self._results.get(tenant, token)

    async def result(self, tenant: str, token: str) -> JobResult:
        """Wait for the result of a job. Raises JetStreamError."""
        return await self._reader.result(tenant, token)

    async def response(self, result: JobResult) -> ResultResponse | None:
        """Return the response of a result, from its object if it has one. Raises JetStreamError, MalformedMessage."""
        return await self._results.response(result)

    async def drop(self, result: JobResult) -> None:
        """Delete the object of a result that has one; the result itself stays. Raises JetStreamError."""
        await self._results.drop(result)

    async def cancel(self, tenant: str, token: str) -> None:
        """Cancel a job that a frontend named, and return once it has an end. It tries until it is cancelled."""
        await self._canceller.cancel(tenant, token)
