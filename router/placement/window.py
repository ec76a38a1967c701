"""The waiting requests of one router: of each a row of costs, its turn, its overlaps, and whether any worker may take it.

Sans-io. A request enters all of these together and leaves them together (`drop`), because only this module changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from headrace.router.index.types import CacheView
from headrace.router.placement.cost import CostMatrix, CostRow
from headrace.router.placement.fair_queue import ClassGroup
from headrace.router.placement.pool import Pool
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.suspects import Suspects
from headrace.router.placement.turn_queues import TurnQueues
from headrace.router.placement.types import Placement, Waiting
from headrace.router.placement.worker_view import comes

PAIRS = 8_192  # of request and worker, brought up to date at a time
LEAST = 8  # requests, however many workers there are
_FEW = 64


class Window:
    """Keeps the waiting requests of one router. Times are seconds of the scheduler's clock."""

    def __init__(self, settings: SchedulerSettings, pool: Pool, view: CacheView) -> None:
        self._patience_s = settings.no_worker_s
        self._loads = pool.loads
        self._view = view
        self.matrix = CostMatrix(pool.loads, pool.disagg.pool, settings.tiers)
        self.rows = self.matrix.rows
        self.queue = TurnQueues(settings.fairness)
        self.interactive = self.queue.interactive.entries
        self.suspects = Suspects(pool.loads, pool.lost)
        self._unplaceable: dict[str, CostRow] = {}  # requests that no worker may take

    # Requests.

    def add(self, request: Waiting, now_s: float) -> float:
        """Give a request a row. Return its uncached tokens on the worker that has most of its prompt."""
        self._view.track(request.id, request.chain)
        row = self.matrix.add(request, self._view.overlaps(request.id), now_s)
        if row.ineligible_since_s is not None:
            self._unplaceable[request.id] = row
        return self._least_uncached(row)

    def enqueue(self, request: Waiting, *, tokens: float) -> None:
        """Give a request that has a row its turn. A suspect gets none before its judge has said that it is none."""
        self.queue.add(request, tokens=tokens)
        if request.suspect:
            self._hold(request)

    def take(self, request_id: str, *, uncached: float) -> None:
        """Take out a request that goes to a worker now, and charge its tenant."""
        self.queue.place(request_id, uncached=uncached)
        self.drop(request_id)

    def put_back(self, placement: Placement, now_s: float) -> None:
        """Let a request wait again in its old place whose placement did not happen."""
        request = placement.request
        self.queue.unplace(request, tokens=self.add(request, now_s))
        if placement.limit:
            self._hold(request)
            self.suspects.assess(request.id, placement.limit, placement.crashes)

    def cancel(self, request_id: str) -> Waiting | None:
        request = self.queue.remove(request_id)
        if request is not None:
            self.drop(request_id)
        return request

    def drop(self, request_id: str) -> None:
        """Forget a request that has left the queue, or never came into it."""
        self.matrix.remove(request_id)
        self._view.untrack(request_id)
        self._unplaceable.pop(request_id, None)
        self.suspects.remove(request_id)

    def expired(self, now_s: float) -> list[Waiting]:
        """Take out the requests whose deadline has passed."""
        late = self.queue.expired(now_s)
        for request in late:
            self.drop(request.id)
        return late

    def unplaceable(self, now_s: float) -> list[tuple[Waiting, float]]:
        """List the requests that no worker may take, and none that is waking will, for longer than they wait for one."""
        found = []
        for row in self._unplaceable.values():
            waited_s = now_s - row.ineligible_since_s if row.ineligible_since_s is not None else 0.0
            if waited_s > self._patience_s and not comes(row.request, self._loads):
                found.append((row.request, waited_s))
        return found

    def columns_changed(self, now_s: float) -> None:
        self.matrix.columns_changed(now_s)
        self._unplaceable = {name: row for name, row in self.rows.items() if row.ineligible_since_s is not None}

    # Suspects.

    def _hold(self, request: Waiting) -> None:
        self.suspects.add(request)
        self.queue.hold(request.id)

    def assess(self, request_id: str, limit: int, crashes: int) -> None:
        """Note what the judge of a request says. One that is no suspect (limit 0) takes its turn again."""
        if self.suspects.assess(request_id, limit, crashes):
            self.queue.release(request_id)

    def eligible(self, request_id: str) -> frozenset[int]:
        return frozenset(np.flatnonzero(self.matrix.eligible[self.rows[request_id].number]).tolist())

    # Changes in the workers' caches. A block that all requests share is stored for the first time, and every row is out of
    # date. What a decision looks at is up to date always; the others follow, some with every decision, and until then only
    # the backlog counts their tokens as they were.

    def refresh_some(self) -> None:
        """Bring some requests up to date, those first that have been out of date for longest."""
        stale = self._view.stale()
        if len(stale) > LEAST:
            self.refresh(list(islice(stale, max(LEAST, PAIRS // max(self.matrix.width, 1)))))
        elif stale:
            self.refresh([*stale])

    def refresh_candidates(self, groups: Sequence[ClassGroup]) -> None:
        stale = self._view.stale()
        if stale:
            self.refresh([one.id for group in groups for one in group.requests if one.id in stale])

    def refresh(self, ids: Iterable[str]) -> None:
        view = self._view
        for request_id in ids:
            changed = view.refresh(request_id)
            if changed is None or changed:
                row = self.matrix.refresh(request_id, view.overlaps(request_id), changed)
                if row is not None:
                    self.queue.update(request_id, self._least_uncached(row))

    def _least_uncached(self, row: CostRow) -> float:
        uncached = self.matrix.uncached[row.number]
        if len(uncached) > _FEW:
            return float(uncached.min())
        return min(uncached.tolist(), default=float(row.request.tokens))  # quicker for the usual few
