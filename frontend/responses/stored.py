"""Background responses: the log of their events, the stored jobs that make them, and their final records."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.durable.stored_job import NewJob
from headrace.broker.errors import DeadlineExceeded, ResponseNotStored, ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.messages.durable import JobResult, JobStatus
from headrace.broker.messages.frames import Row
from headrace.frontend.errors import FrontendError
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import EventSource, ResponsePort, StoredJobPort
from headrace.frontend.responses.answer import ResponseAnswer, ResponseFault
from headrace.frontend.responses.writers import BackgroundEvents, Keep, ResponseProgress, event_of

END = b"\n\n"  # of an event; JSON inside an event has no bare line end


class EventsGone(FrontendError, status=400, code="events_not_kept"):
    """The response has too many events to keep."""


class EventLog:
    """A log in which event n has sequence number n. Over `max_bytes` all events are dropped, as a log with a gap is useless."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._size = 0
        self._more = asyncio.Event()
        self.ended = False
        self.dropped = False

    def add(self, events: bytes) -> None:
        """Add whole events, in order."""
        self._size += len(events)
        if self._size > self._max_bytes:
            self._events.clear()
            self.dropped = True
        if not self.dropped:
            self._events += [event + END for event in events.split(END) if event]
        self._wake()

    def end(self) -> None:
        """Mark the log as complete."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def since(self, number: int) -> bytes:
        """Wait for the events from this number on; empty if the log has ended before it. Raises EventsGone."""
        while not self.dropped and len(self._events) <= number and not self.ended:
            await self._more.wait()
        if self.dropped:
            raise EventsGone("the events of this response are not kept: they are too many")
        return b"".join(self._events[number:])

    async def close(self) -> None:
        """Do nothing: a log has no reader of its own."""

    def count(self) -> int:
        return len(self._events)

    def packed(self) -> bytes:
        """Return all events, compressed; empty if they were dropped. Takes long for a long answer: call it in a thread."""
        return b"" if self.dropped else zlib.compress(b"".join(self._events), 3)


def unpacked(stored: bytes, max_bytes: int) -> EventLog:
    """Return a stored log, ended. Takes long for a long answer: call it in a thread."""
    log = EventLog(max_bytes)
    if stored:
        log.add(zlib.decompressobj().decompress(stored, max_bytes + 1))
    else:
        log.dropped = True
    log.ended = True
    return log


# Runs responses in the background as stored jobs: any frontend takes one, any carries it, any answers for it.
#
# The record is in the store from the beginning, `queued`. While the job is open its state and events are read from the job's
# stream; the first two events are those of the record. The carrier stores the final record with all events. A job that ended
# without its carrier (cancelled, expired) is closed by its reader, as its result says.

log = structlog.get_logger()

HEAD = 2  # events before those of the job's stream: created and queued
MOST_ACCEPTED = 1024  # responses that are remembered where they were accepted, in case the store loses them
END_S = 30.0  # from the end of a job to its result
PACKING_RATIO = 8  # limit on the events as a multiple of the record's, because events repeat everything and compress well

_STATUS: dict[JobStatus, str] = {"cancelled": "cancelled"}  # others without an answer: failed


class EventReader(Protocol):
    """The events of a background response from any number on, one reader at a time."""

    async def since(self, number: int) -> bytes:
        """Wait for the events from this number on; empty if there are none any more."""

    async def close(self) -> None:
        """Stop reading."""


class StoredBackground:
    """The background responses of all frontends."""

    def __init__(self, store: ResponsePort, jobs: StoredJobPort, *, max_bytes: int) -> None:
        """`max_bytes` is the limit of a stored record."""
        self._store = store
        self._jobs = jobs
        self._accepted: OrderedDict[str, tuple[NewJob, StoredResponse]] = OrderedDict()  # here, the latest
        self.max_events = PACKING_RATIO * max_bytes

    async def start(self, job: NewJob, record: StoredResponse) -> None:
        """Store a queued response, and then its job. Raises ResponseNotStored, an AdmissionError."""
        record = msgspec.structs.replace(record, judge=job.name, job=job.name)
        await self._store.put(record)
        try:
            await self._jobs.publish(job)
        except HeadraceError:
            with contextlib.suppress(HeadraceError):
                await self._store.delete(record.id, record.tenant)
            raise
        self._accepted[record.id] = (job, record)
        if len(self._accepted) > MOST_ACCEPTED:
            self._accepted.popitem(last=False)

    async def store_again(self) -> None:
        """Store again what this frontend has accepted and the store has lost, because its files were damaged or removed."""
        for response_id, (_, record) in list(self._accepted.items()):
            with contextlib.suppress(HeadraceError):
                await self.get(response_id, record.tenant)

    async def _read(self, response_id: str, tenant: str) -> StoredResponse:
        try:
            record = await self._store.get(response_id, tenant)
        except ResponseUnknown:
            return await self._stored_again(response_id, tenant)
        if not record.judge:
            self._accepted.pop(response_id, None)
        return record

    async def _stored_again(self, response_id: str, tenant: str) -> StoredResponse:
        """Store a response again that the store has lost. One whose job has a result was deleted. Raises ResponseUnknown."""
        job, record = self._accepted.get(response_id, (None, None))
        if job is None or record is None or record.tenant != tenant:
            raise ResponseUnknown(response_id)
        if await self._jobs.known(tenant, job.name) is not None:
            self._accepted.pop(response_id, None)
            raise ResponseUnknown(response_id)
        log.warning("background.stored_again", response=response_id)
        with contextlib.suppress(HeadraceError):  # the next reader tries again
            await self._store.put(record)
            await self._jobs.publish(job)  # the same job: a carrier that has it goes on with it
        return record

    async def get(self, response_id: str, tenant: str, /) -> StoredResponse:
        """Return the current record of a response. Raises ResponseUnknown, a JetStreamError."""
        record = await self._read(response_id, tenant)
        if not record.job:
            return record
        result = await self._jobs.known(tenant, record.job)
        if result is not None:
            return await self._close(record, result)
        if record.judge and await self._jobs.begun(tenant, record.job):
            return _with_status(record, "in_progress")
        return record

    async def events(self, response_id: str, tenant: str) -> EventReader:
        """Return the events of a background response. Raises as `get`, and EventsGone."""
        record = await self.get(response_id, tenant)
        if record.job and (record.judge or not record.events):
            return FollowedEvents(record, self._jobs.events(record.tenant, record.job))
        return StoredEvents(await asyncio.to_thread(unpacked, record.events, self.max_events))

    async def cancel(self, response_id: str, tenant: str) -> StoredResponse:
        """Cancel a response and return it as it ended, which may be complete. Raises as `get`, DeadlineExceeded."""
        record = await self.get(response_id, tenant)
        if not record.judge:
            return record
        try:
            async with asyncio.timeout(END_S):
                await self._jobs.cancel(tenant, record.job)
                result = await self._jobs.result(tenant, record.job)
        except TimeoutError:
            raise DeadlineExceeded(f"response {response_id!r} could not be cancelled in time; it may still be") from None
        return await self._close(await self._store.get(response_id, tenant), result)

    async def forget(self, response_id: str, tenant: str) -> None:
        """Cancel a response before its deletion, so that its end does not store it again. Raises as `cancel`."""
        await self.cancel(response_id, tenant)

    async def _close(self, record: StoredResponse, result: JobResult) -> StoredResponse:
        """Return the final record of a job that has ended, and store it if the store has another one."""
        answer = msgspec.json.decode(record.answer, type=dict[str, Any])
        if result.status == "done":
            if not record.judge:
                return record
            response = await self._jobs.response(result)
            if response is None:
                return record
            answer = msgspec.json.decode(response.body, type=dict[str, Any])
        else:
            status = _STATUS.get(result.status, "failed")
            if not record.judge and answer["status"] == status:
                return record
            answer |= {"status": status, "output": []}
            if status == "failed":
                answer["error"] = msgspec.to_builtins(await self._fault(result))
        output = msgspec.json.encode(answer["output"])
        closed = msgspec.structs.replace(
            record, answer=msgspec.json.encode(answer), output=output, before=b"", judge="", events=b""
        )
        log.info("background.closed", response=record.id, status=answer["status"])
        with contextlib.suppress(ResponseNotStored):  # the next reader tries again
            await self._store.put(closed)
        return closed

    async def _fault(self, result: JobResult) -> ResponseFault:
        message = result.error.message if result.error is not None else "the response could not be made"
        response = await self._jobs.response(result)
        if response is not None:
            error = msgspec.json.decode(response.body, type=_Refusal).error
            message = error.message or message
        return ResponseFault(code="server_error", message=message)


class _Words(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Words = msgspec.field(default_factory=_Words)


class StoredEvents:
    """Events that are all there."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    async def since(self, number: int) -> bytes:
        return await self._log.since(number)

    async def close(self) -> None:
        """Do nothing: they are in memory."""


class FollowedEvents:
    """Events from a job's stream, behind the two of its record. Numbers may only grow."""

    def __init__(self, record: StoredResponse, source: EventSource) -> None:
        self._record = record
        self._source = source
        self._ended = False

    async def since(self, number: int) -> bytes:
        if number < HEAD:
            return b"".join(head_events(self._record)[number:])
        while not self._ended:
            stretch = await self._source.next()
            self._ended = stretch.end is not None
            at = stretch.first + HEAD
            events = [event_of(data) for data in stretch.events]
            if stretch.end is not None and stretch.end.status != "done" and not stretch.events:
                status = _STATUS.get(stretch.end.status or "failed", "failed")
                fault = stretch.end.fault.message if stretch.end.fault is not None else ""
                events.append(_failed_event(self._record, status, fault, at))
            if found := b"".join(events[max(0, number - at) :]):
                return found
        return b""

    async def close(self) -> None:
        await self._source.close()


def queued_record(record: StoredResponse) -> dict[str, Any]:
    answer = msgspec.json.decode(record.answer, type=dict[str, Any])
    begun: dict[str, Any] = dict.fromkeys(("usage", "error", "incomplete_details", "completed_at"))
    begun |= {"status": "queued", "output": []}
    return answer | {name: value for name, value in begun.items() if name in answer}


def head_events(record: StoredResponse) -> list[bytes]:
    """Return the two events before those of the stream."""
    response = msgspec.json.encode(queued_record(record))
    return [
        event_of(b'{"type":"%b","response":%b,"sequence_number":%d}' % (kind, response, number))
        for number, kind in enumerate((b"response.created", b"response.queued"))
    ]


def _failed_event(record: StoredResponse, status: str, message: str, number: int) -> bytes:
    """Return the last event of a response that no carrier has ended: `response.failed`, also for a cancelled one."""
    response = queued_record(record) | {"status": status}
    if status == "failed":
        response["error"] = {"code": "server_error", "message": message or "the response could not be made"}
    kind = b"response.failed"
    return event_of(b'{"type":"%b","response":%b,"sequence_number":%d}' % (kind, msgspec.json.encode(response), number))


def _with_status(record: StoredResponse, status: str) -> StoredResponse:
    answer = msgspec.json.decode(record.answer, type=dict[str, Any]) | {"status": status}
    return msgspec.structs.replace(record, answer=msgspec.json.encode(answer))


STORE_TRIES = 3
STORE_AGAIN_S = 0.5

CANCELLED = frozenset({"cancelled", "request_cancelled"})


class FinalRecords:
    """Stores the final records of background responses."""

    def __init__(self, store: ResponsePort, metrics: Metrics, *, max_events: int) -> None:
        """`max_events` is the limit of the events of one response, in bytes."""
        self._store = store
        self._metrics = metrics
        self.max_events = max_events

    async def put(self, record: StoredResponse, events: EventLog) -> None:
        """Store a final record. If that fails, readers make it of the job's result."""
        record = msgspec.structs.replace(record, events=await asyncio.to_thread(events.packed))
        for attempt in range(1, STORE_TRIES + 1):
            try:
                await self._store.put(record)
            except ResponseNotStored as error:
                self._metrics.stored.labels(error.reason).inc()
                log.warning("response.not_stored", response=record.id, reason=error.reason, attempt=attempt)
                if error.reason == "too_large" and not record.events:
                    return
                record = msgspec.structs.replace(record, events=b"" if error.reason == "too_large" else record.events)
                await asyncio.sleep(STORE_AGAIN_S)
            else:
                self._metrics.stored.labels("stored").inc()
                return


class JobResponseEvents(BackgroundEvents):
    """Writes the events behind the first two, which readers take from the record."""

    def __init__(
        self,
        progress: ResponseProgress,
        keep: Keep | None,
        records: FinalRecords,
        record: Callable[[ResponseAnswer], StoredResponse],
    ) -> None:
        """`record` makes the final record of the response."""
        super().__init__(progress, keep)
        self.unsettled = True
        self._records = records
        self._record = record
        self._response = progress.response
        self._log = EventLog(records.max_events)
        self._log.add(self.queued())
        self._last = b""

    def events(self, rows: list[Row]) -> bytes:
        events = super().events(rows)
        self._log.add(events)
        return events

    async def settle(self) -> None:
        """Add the response to its conversation, and store it."""
        await super().settle()
        self._last = super().closing()
        self._log.add(self._last)
        self._log.end()
        await self._records.put(self._record(self._response), self._log)

    def closing(self) -> bytes:
        return self._last

    def failure(self, error: FrontendError) -> bytes:
        """Return the last event of a response that failed or was cancelled."""
        return self.cancelled() if error.code in CANCELLED else super().failure(error)
