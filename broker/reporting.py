"""What a worker tells everybody: job events as they happen, and how loaded it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.codec import encode
from broker.messages import EventKind, JobEvent, JobEvents, LoadReport
from jetstream.ports import Messaging
from jetstream.subjects import Subjects

EVENTS_GATHER_S = 0.005
LOAD_STEPS = 10  # a change is reported within this part of the period


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

    def add(self, kind: EventKind, request_id: str, attempt: int, tokens: int) -> None:
        if not self._events:
            asyncio.get_running_loop().call_later(EVENTS_GATHER_S, self._send)
        self._events.append(JobEvent(kind, request_id, attempt, self._worker, tokens))
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
    """Load reports: every period, and soon after a change."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        pool: str,
        worker: str,
        period_s: float,
        make: Callable[[int], LoadReport],
    ) -> None:
        """`make(n)` builds the n-th report."""
        self._messaging = messaging
        self._subject = subjects.load(pool, worker)
        self._period_s = period_s
        self._make = make
        self._changed = False

    def changed(self) -> None:
        self._changed = True

    async def run(self) -> None:
        n = 0
        while True:
            n += 1
            self._changed = False
            self._messaging.send(self._subject, encode(self._make(n)))
            for _ in range(LOAD_STEPS):
                await asyncio.sleep(self._period_s / LOAD_STEPS)
                if self._changed:
                    break
