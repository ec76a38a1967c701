"""A clock that jumps to whatever is next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """Things at the same time happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

    def at(self, at_s: float, act: Callable[..., None], *args: Any) -> None:
        """Have it done then."""
        self._pushed += 1
        heapq.heappush(self._heap, (at_s, self._pushed, act, args))

    @property
    def next_s(self) -> float:
        """Return when something is to be done. Something must be."""
        return self._heap[0][0]

    def jump(self) -> None:
        """Go to the next time and do all that is to be done then."""
        self.now_s = now_s = self.next_s
        while self._heap and self._heap[0][0] <= now_s:
            _, _, act, args = heapq.heappop(self._heap)
            act(*args)
