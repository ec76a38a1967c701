"""What a worker tells everybody: job events as they happen, and how loaded it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.broker.codec import encode
from headrace.broker.messages import EventKind, JobEvent, JobEvents, LoadReport
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

EVENTS_GATHER_S = 0.005


class EventSender:
    """Job events, gathered for a few milliseconds into one message: readers build load views from them, not answers.

    `started` is different: by it a judge knows that a worker really had a first attempt, and counts its crash.  It goes out
    before the engine's next step.
    """

    def __init__(self, messaging: Messaging, subjects: Subjects, *, pool: str, worker: str) -> None:
        self._messaging = messaging
        self._subject = subjects.events(pool)
        self._worker = worker
        self._events: list[JobEvent] = []
        self._urgent = False

    def add(self, kind: EventKind, request_id: str, attempt: int, tokens: int, *, uncached: int = 0) -> None:
        if not self._events:
            asyncio.get_running_loop().call_later(EVENTS_GATHER_S, self._send)
        self._events.append(JobEvent(kind, request_id, attempt, self._worker, tokens, uncached))
        if kind == "started" and not self._urgent:
            self._urgent = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._urgent = False
        if not self._events:
            return
        events, self._events = self._events, []
        self._messaging.send(self._subject, encode(JobEvents(events=events)))


class LoadReporter:
    """Load reports: every period, and at once after a change, though never closer together than `gap_s`."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        pool: str,
        worker: str,
        period_s: float,
        gap_s: float,
        make: Callable[[int], LoadReport],
    ) -> None:
        """`make(n)` builds the n-th report."""
        self._messaging = messaging
        self._subject = subjects.load(pool, worker)
        self._period_s = period_s
        self._gap_s = gap_s
        self._make = make
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Something in the next report will differ. Cheap: called for every run that comes or goes."""
        self._change.set()

    async def run(self) -> None:
        n = 0
        while True:
            n += 1
            self._change.clear()
            self._messaging.send(self._subject, encode(self._make(n)))
            await asyncio.sleep(self._gap_s)
            try:
                async with asyncio.timeout(self._period_s - self._gap_s):
                    await self._change.wait()
            except TimeoutError:
                pass
