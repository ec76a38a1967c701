"""Limits the time that socket callbacks take in one iteration of the event loop, and defers the rest to later iterations.

One iteration runs the callbacks of every socket with data. With thousands of sockets this takes longer than streams may wait,
and clients decide how long. So the work that they cause runs at once only while the iteration is within its budget. The rest
waits in a queue, and each following iteration runs a part of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

BUDGET_S = 0.008  # per iteration for new data, and as much for the queue; the rest of the iteration runs the tasks they woke


class LoopBudget:
    """The budget and the queue of one event loop. Each connection has at most a few entries, which bounds the queue."""

    __slots__ = ("_began", "_budget_s", "_loop", "_queue")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, budget_s: float = BUDGET_S) -> None:
        self._loop = loop
        self._budget_s = budget_s
        self._began = 0.0  # time of the first data in this iteration; 0 = none yet
        self._queue: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def is_spent(self) -> bool:
        """Return True if new work has to be deferred."""
        began = self._began
        if not began:
            self._began = time.perf_counter()
            self._loop.call_soon(self._next)
            return False
        return time.perf_counter() - began > self._budget_s

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` in one of the next iterations, after all work that was deferred before."""
        self._queue.append(work)
        self.is_spent()  # schedules the next iteration

    def _next(self) -> None:
        """Begin another iteration: run deferred work first, before new data."""
        self._began = 0.0
        queue = self._queue
        if not queue:
            return
        until = time.perf_counter() + self._budget_s
        try:
            while queue and time.perf_counter() < until:
                queue.popleft()()
        finally:
            if queue:
                self.is_spent()
