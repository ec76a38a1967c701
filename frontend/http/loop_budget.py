"""Fair turns of the event loop: what comes in crowds is handled over several of them.

One turn of the loop takes everything that every socket has to say.  With thousands of sockets that is longer than anybody else
wants to wait, and it is up to clients.  So what they cause is run at once only while the turn is young; the rest waits in a
line, some of it run in each of the turns that follow.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

BUDGET_S = 0.008  # for what sockets bring, and as much for what waits; the rest of a turn is tasks that these woke up


class LoopBudget:
    """The line of one event loop. What is in it is bounded by the connections: each has at most a few things waiting."""

    __slots__ = ("_began", "_budget_s", "_line", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, budget_s: float = BUDGET_S) -> None:
        self._loop = loop
        self._budget_s = budget_s
        self._began = 0.0  # of this turn, by what came first in it; 0 = nothing came yet
        self._line: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def is_late(self) -> bool:
        """Whether something new has to wait in the line."""
        began = self._began
        if not began:
            self._began = time.perf_counter()
            self._loop.call_soon(self._next)
            return False
        return time.perf_counter() - began > self._budget_s

    def wait(self, work: Callable[[], None]) -> None:
        """Run it in one of the next turns, after everything that waits already."""
        self._line.append(work)
        self.is_late()  # makes sure that there is a next turn

    def _next(self) -> None:
        """Another turn: for what waits first, and then for what sockets bring."""
        self._began = 0.0
        line = self._line
        if not line:
            return
        until = time.perf_counter() + self._budget_s
        try:
            while line and time.perf_counter() < until:
                line.popleft()()
        finally:
            if line:
                self.is_late()
