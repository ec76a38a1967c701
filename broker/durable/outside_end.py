"""Ends jobs from outside of their carriers: cancelled ones, overdue ones, and those that no carrier can read or run.

It is the same compare-and-set as a carrier's: of a plain job the create-once of its result, of a durable stream its end entry.
The writer is told the end that stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from headrace.broker.durable.errors import CarrierLost
from headrace.broker.durable.fold import JobState
from headrace.broker.durable.names import JobRef, new_nonce
from headrace.broker.durable.result_store import ResultStore
from headrace.broker.durable.results import fault_result
from headrace.broker.durable.stream_writer import DurableStreamWriter, read_stream
from headrace.broker.messages import JobFault, JobResult, JobStatus
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

RETRY_S = 0.2


class _End(NamedTuple):
    """The end of a stream that stands. `own`: it was written here."""

    status: JobStatus | None
    fault: JobFault | None
    own: bool


class OutsideEnds:
    """Writes ends without a renderer and without a lease."""

    def __init__(self, messaging: Messaging, subjects: Subjects, results: ResultStore, *, wall: Callable[[], float]) -> None:
        """`wall` gives Unix time."""
        self._messaging = messaging
        self._subjects = subjects
        self._results = results
        self._wall = wall

    async def end(self, job: JobRef, result: JobResult, fault: JobFault | None = None) -> JobStatus:
        """End a job with this result unless it has ended, and return the status that stands. It tries until it is cancelled.

        A stream that has ended as `done` or `failed` may still lack its result, which its carrier makes.
        """
        if not job.durable:
            return (await self._results.commit(job.tenant, job.token, result)).status
        return await self.end_either(job, result, fault)

    async def end_either(self, job: JobRef, result: JobResult, fault: JobFault | None = None) -> JobStatus:
        """End a job of which it is not known whether it is a durable stream, as `end` does: whatever `job.durable` says.

        The end entry decides about a stream. A plain job never has another end there than one from outside, and its carrier may
        have been first with its result.
        """
        ended = await self._end_stream(job, result.status, fault)
        if ended.own:
            return (await self._results.commit(job.tenant, job.token, result)).status
        if ended.status in ("cancelled", "expired", "poison", "malformed"):
            stands = fault_result(job, ended.status, ended.fault, self._wall())
            return (await self._results.commit(job.tenant, job.token, stands)).status
        return ended.status or "failed"

    async def _end_stream(self, job: JobRef, status: JobStatus, fault: JobFault | None) -> _End:
        nonce = new_nonce()
        while True:
            state = await self._read(job)
            if state.end is not None:
                return _End(state.end.status, state.end.fault, own=state.end.nonce == nonce)
            writer = DurableStreamWriter(self._messaging, self._subjects, job.tenant, job.token, nonce=nonce)
            writer.continue_from(state)
            try:
                await writer.append("end", status=status, fault=fault, first_event=state.events)
            except CarrierLost:  # a carrier has gone on: the next read says what the end has to follow
                await asyncio.sleep(RETRY_S)
            else:
                return _End(status, fault, own=True)

    async def _read(self, job: JobRef) -> JobState:
        while True:
            try:
                return await read_stream(self._messaging, self._subjects, job.tenant, job.token)
            except JetStreamError as error:
                log.debug("stream.unread", stored_job=job.id, error=str(error))
                await asyncio.sleep(RETRY_S)
