"""KV events on their way from the engine to the task that forwards them, bounded and numbered.

Batches are numbered from 0 at the engine's start, one per step that changed the cache, with or without a reader. A reader sees
by the numbers that it missed a batch, and can ask for it again while it is kept.  A reader that starts late or falls far
behind does not get a gap: it gets `cleared` and then everything that is cached, under the number of the last batch that this
includes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.faults import Faults

Inventory = Callable[[], list[KvEvent]]
_MOST_STEPS = 4096


class EventBuffer:
    """KV events of the last steps for one reader. Kept only while it reads, and `replay` of them for a while after that."""

    def __init__(self, most_steps: int = _MOST_STEPS, *, replay: int = 0, faults: Faults | None = None) -> None:
        self._most = most_steps
        self._drop_every = faults.kv_drop_every if faults is not None else None
        self._reorder_every = faults.kv_reorder_every if faults is not None else None
        self._steps: deque[KvBatch] = deque()
        self._kept: deque[KvBatch] = deque(maxlen=replay)
        self._held_back: KvBatch | None = None
        self._ready = asyncio.Event()
        self._reading = False
        self._covered = False
        self._next = 0

    def put(self, events: list[KvEvent], inventory: Inventory) -> None:
        """Append one step's events; with no room left, replace all by the present state."""
        number = self._next
        self._next += 1
        if self._covered:
            self._covered, events = False, []
        if not self._reading:
            self._kept.clear()  # kept batches must be contiguous
            return
        batch = KvBatch(events, number)
        self._kept.append(batch)
        if len(self._steps) >= self._most:
            self._restart(inventory)
        else:
            self._deliver(batch)
        self._ready.set()

    def _deliver(self, batch: KvBatch) -> None:
        """Append a batch with the injected faults: it may be lost, or come after the batch that follows it."""
        held, self._held_back = self._held_back, None
        if self._drop_every is not None and (batch.number + 1) % self._drop_every == 0:
            self._held_back = held
            return
        if held is None and self._reorder_every is not None and (batch.number + 1) % self._reorder_every == 0:
            self._held_back = batch
            return
        self._steps.append(batch)
        if held is not None:
            self._steps.append(held)

    def _restart(self, inventory: Inventory) -> None:
        self._steps.clear()
        self._held_back = None
        self._steps.append(KvBatch([KvEvent(kind="cleared"), *inventory()], self._next - 1))

    def replay(self, start: int) -> list[KvBatch]:
        """Return the kept batches from this number on, without faults; the first may have a higher number."""
        return [batch for batch in self._kept if batch.number >= start]

    def replay_from(self, start: object) -> dict[str, Any]:
        """Return `replay` as plain data: the batches, and `next`, the number of the batch to come. Raises RequestInvalid."""
        if not isinstance(start, int) or start < 0:
            raise RequestInvalid(f"replay from {start!r}: not the number of a batch")
        batches = [{"number": batch.number, "events": msgspec.to_builtins(list(batch))} for batch in self.replay(start)]
        return {"batches": batches, "next": self._next}

    async def read(self, inventory: Inventory, *, ahead: bool = False) -> AsyncGenerator[KvBatch]:
        """Yield batches, one per step, beginning with the present state.

        `ahead`: a step runs whose events are not here yet, but the inventory has them. They are left out when they come.
        """
        self._reading, self._covered = True, ahead
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
            self._held_back = None
