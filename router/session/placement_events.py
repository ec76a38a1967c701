"""The `placed` events by which all routers of a pool learn of a placement, so that they see the same load."""

from __future__ import annotations

import asyncio

from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages import JobEvent, JobEvents
from headrace.broker.places import rank_of, worker_of
from headrace.router.placement.disagg_planner import announced
from headrace.router.placement.types import Placement
from headrace.router.session.deps import RouterDeps
from headrace.router.session.held_request import HeldRequest

MAX_HASHES = 512  # of new blocks in one event


class Announcer:
    """Gathers the `placed` events of one turn of the loop into one message."""

    def __init__(self, deps: RouterDeps) -> None:
        self._messaging = deps.messaging
        self._subject = deps.subjects.events(deps.pool)
        self._router = deps.router
        self._events: list[JobEvent] = []
        self._loop = asyncio.get_running_loop()

    def placed(self, held: HeldRequest, placement: Placement) -> None:
        """Announce one placement with the next message."""
        if not self._events:
            self._loop.call_soon(self._send)
        self._events.append(
            JobEvent(
                "placed",
                held.id,
                held.attempt,
                worker_of(placement.worker),
                held.head.tokens,
                placement.uncached,
                len(placement.new_blocks),
                self._router,
                pack_u64(placement.new_blocks[:MAX_HASHES]),
                announced(placement),
                rank_of(placement.worker),
            )
        )

    def _send(self) -> None:
        events, self._events = self._events, []
        self._messaging.send(self._subject, encode(JobEvents(events=events)))
