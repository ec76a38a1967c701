"""Cancels stored jobs: tells their carriers, then writes the end itself unless there is one.

A canceller need not know whether a job is plain or durable: it writes the end of the stream first, and then the result.
Of a plain job only the result decides, and a carrier that meets the entry makes the same result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.broker.codec import encode
from headrace.broker.durable.names import JobRef
from headrace.broker.durable.outside_end import OutsideEnds
from headrace.broker.durable.result_store import ResultStore
from headrace.broker.durable.results import TEXTS, without_answer
from headrace.broker.messages import Cancel, JobFault, JobStatus
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

CARRIER_FIRST_S = 0.3  # time in which the carrier of a job ends it itself, a durable stream with the rows that it has


class JobCanceller:
    """Cancels jobs of any carrier."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, wall: Callable[[], float]) -> None:
        """`wall` gives Unix time."""
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
