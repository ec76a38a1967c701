"""KV events on their way from the engine to whoever forwards them, bounded.

A reader that starts late or falls far behind does not get a gap: it gets `cleared` and then everything that is cached.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from workers.engine import KvEvent

Inventory = Callable[[], list[KvEvent]]
_MOST_STEPS = 4096


class EventBuffer:
    """Steps' worth of events for one reader; kept only while somebody reads."""

    def __init__(self, most_steps: int = _MOST_STEPS) -> None:
        self._most = most_steps
        self._steps: deque[list[KvEvent]] = deque()
        self._ready = asyncio.Event()
        self._reading = False

    def put(self, events: list[KvEvent], inventory: Inventory) -> None:
        """Append one step's events; with no room left, replace all by the present state."""
        if not self._reading:
            return
        if len(self._steps) >= self._most:
            self._restart(inventory)
        else:
            self._steps.append(events)
        self._ready.set()

    def _restart(self, inventory: Inventory) -> None:
        self._steps.clear()
        self._steps.append([KvEvent(kind="cleared"), *inventory()])

    async def read(self, inventory: Inventory) -> AsyncIterator[list[KvEvent]]:
        """Lists of events, a list per step, beginning with the present state."""
        self._reading = True
        self._restart(inventory)
        try:
            while True:
                while self._steps:
                    yield self._steps.popleft()
                self._ready.clear()
                await self._ready.wait()
        finally:
            self._reading = False
            self._steps.clear()
