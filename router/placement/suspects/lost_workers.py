"""Counts the workers that a pool has lost and that are due back.

A worker that leaves without having announced it has died, and its supervisor starts another in its place.  How soon, a router
does not know; after `DUE_BACK_S` it counts on that no more.
"""

from __future__ import annotations

from collections import deque

DUE_BACK_S = 3.0  # `headrace up` starts a killed worker again after 0.5 s, and that takes 1.2 s with the simulator


class LostWorkers:
    """The deaths of one pool's workers that no new worker has made up for yet. Times are seconds of the scheduler's clock."""

    def __init__(self) -> None:
        self._lost_s: deque[float] = deque()

    def lose(self, now_s: float) -> None:
        """Note a worker that is gone without having drained."""
        self._lost_s.append(now_s)
        self._expire(now_s)

    def join(self) -> None:
        """Note a new worker. It makes up for the one that was lost first."""
        if self._lost_s:
            self._lost_s.popleft()

    def due(self, now_s: float) -> int:
        """Return how many workers are due back."""
        self._expire(now_s)
        return len(self._lost_s)

    def _expire(self, now_s: float) -> None:
        while self._lost_s and now_s - self._lost_s[0] >= DUE_BACK_S:
            self._lost_s.popleft()
