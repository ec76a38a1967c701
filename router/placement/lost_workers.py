"""Counts the workers that a pool has lost and that are due back.

A worker that leaves without having announced it has died, and its supervisor starts another in its place.  That takes about as
long as the start of the one that died, which its lease tells.  Streams that were on it wait for that only if it takes less than
what they may pause for.
"""

from __future__ import annotations

WAIT_S = 2.0  # `headrace up` starts a killed worker again after 0.5 s, and the simulator takes 1.2 s to start
SLOW_START_S = 5.0  # an engine that took longer to start is not waited for: it would not be back in time


def due_back_s(start_s: float) -> float:
    """Return how long after its death a worker is waited for whose own start took `start_s`, 0 = unknown.

    The first start of a deployment, of all its processes at once, takes up to three times as long as one alone.
    """
    return WAIT_S if start_s <= SLOW_START_S else 0.0


class LostWorkers:
    """The deaths of one pool's workers that no new worker has made up for yet. Times are seconds of the scheduler's clock."""

    def __init__(self) -> None:
        self._until_s: list[float] = []  # in the order of the deaths

    def lose(self, now_s: float, start_s: float = 0.0) -> None:
        """Note a worker that is gone without having drained, and whose start took `start_s`."""
        self._expire(now_s)
        if wait_s := due_back_s(start_s):
            self._until_s.append(now_s + wait_s)

    def join(self) -> None:
        """Note a new worker. It makes up for the one that is waited for and was lost first."""
        if self._until_s:
            self._until_s.pop(0)

    def due(self, now_s: float) -> int:
        """Return how many workers are due back."""
        self._expire(now_s)
        return len(self._until_s)

    def _expire(self, now_s: float) -> None:
        self._until_s = [until_s for until_s in self._until_s if now_s < until_s]
