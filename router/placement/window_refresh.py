"""Brings the rows of waiting requests up to date after changes in the workers' caches, as much as a decision has time for.

A block that all requests share is stored for the first time, and every row in the window is out of date.  What a decision looks
at is up to date always; the others follow, some with every decision, and until then only the backlog counts their tokens as
they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from headrace.router.index.types import CacheView
from headrace.router.placement.costs.cost_matrix import CostMatrix, CostRow
from headrace.router.placement.fairness.fair_queue import ClassGroup
from headrace.router.placement.fairness.turn_queues import TurnQueues

PAIRS = 8_192  # of request and worker, brought up to date at a time
LEAST = 8  # requests, however many workers there are
_FEW = 64


class WindowRefresh:
    """Keeps the rows of one window, and the backlog of its queue."""

    def __init__(self, view: CacheView, window: CostMatrix, queue: TurnQueues) -> None:
        self._view = view
        self._window = window
        self._queue = queue

    def some(self) -> None:
        """Bring some requests up to date, those first that have been out of date for longest."""
        stale = self._view.stale()
        if len(stale) > LEAST:
            self.requests(list(islice(stale, max(LEAST, PAIRS // max(self._window.width, 1)))))
        elif stale:
            self.requests([*stale])

    def candidates(self, groups: Sequence[ClassGroup]) -> None:
        """Bring all requests of these groups up to date."""
        stale = self._view.stale()
        if stale:
            self.requests([one.id for group in groups for one in group.requests if one.id in stale])

    def requests(self, ids: Iterable[str]) -> None:
        """Bring these requests up to date."""
        view = self._view
        for request_id in ids:
            changed = view.refresh(request_id)
            if changed is None or changed:
                row = self._window.refresh(request_id, view.overlaps(request_id), changed)
                if row is not None:
                    self._queue.update(request_id, least_uncached(row, self._window))


def least_uncached(row: CostRow, window: CostMatrix) -> float:
    """Return the prompt tokens of a request that the best worker for it would have to compute."""
    uncached = window.uncached[row.number]
    if len(uncached) > _FEW:
        return float(uncached.min())
    return min(uncached.tolist(), default=float(row.request.tokens))  # quicker for the usual few
