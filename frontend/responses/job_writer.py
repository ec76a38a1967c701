"""Writes the events of a background response that a carrier makes, and stores the response with all of them at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from headrace.broker.errors import ResponseNotStored
from headrace.broker.ingress.response_store import StoredResponse
from headrace.broker.messages import Row
from headrace.frontend.errors import FrontendError
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import ResponsePort
from headrace.frontend.responses.answer import ResponseAnswer
from headrace.frontend.responses.eventlog import EventLog
from headrace.frontend.responses.writers import BackgroundEvents, Keep, ResponseProgress

log = structlog.get_logger()

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
