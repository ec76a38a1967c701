"""What a router tells everybody about its placements, so that all routers of a pool see the same load."""

from __future__ import annotations

import asyncio

from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages import JobEvent, JobEvents
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.placement.disagg.planner import announced
from headrace.router.placement.types import Placement
from headrace.router.session.window import HeldRequest

MAX_HASHES = 512  # of new blocks in one event


class Announcer:
    """Gathers the `placed` events of one turn of the loop into one message."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, pool: str, router: str) -> None:
        self._messaging = messaging
        self._subject = subjects.events(pool)
        self._router = router
        self._events: list[JobEvent] = []
        self._loop = asyncio.get_running_loop()

    def placed(self, held: HeldRequest, placement: Placement) -> None:
        if not self._events:
            self._loop.call_soon(self._send)
        self._events.append(
            JobEvent(
                "placed",
                held.id,
                held.attempt,
                placement.worker,
                held.head.tokens,
                placement.uncached,
                len(placement.new_blocks),
                self._router,
                pack_u64(placement.new_blocks[:MAX_HASHES]),
                announced(placement),
            )
        )

    def _send(self) -> None:
        events, self._events = self._events, []
        self._messaging.send(self._subject, encode(JobEvents(events=events)))
