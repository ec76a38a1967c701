"""Tells which workers have room for the first of those that wait: batch requests take only what interactive ones leave.

The workers of a small pool are looked at one by one, those of a large one as arrays (`many_workers.py`).
"""

from __future__ import annotations

from math import inf

from headrace.router.placement.costs.cost import (
    batch_lookahead_tokens,
    has_batch_room,
    has_room,
    lookahead_tokens,
    make_worker_view,
)
from headrace.router.placement.disagg.prefill_costs import PrefillView
from headrace.router.placement.disagg_planner import DisaggPlanner
from headrace.router.placement.fairness.turn_queues import TurnQueues
from headrace.router.placement.interactive_presence import InteractivePresence
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.worker_registry import WorkerRegistry
from headrace.router.placement.worker_view import WorkerView


class Room:
    """The room of a pool, as the first waiting request of one router finds it."""

    def __init__(
        self,
        settings: SchedulerSettings,
        loads: LoadTable,
        workers: WorkerRegistry,
        queue: TurnQueues,
        presence: InteractivePresence,
        disagg: DisaggPlanner,
    ) -> None:
        self._settings = settings
        self._loads = loads
        self._recent = workers.recent
        self._many = workers.many
        self._queue = queue
        self._presence = presence
        self._disagg = disagg

    def any(self, now_s: float) -> bool:
        """Return whether a worker has room for the first of those that wait: a batch request only if no other one does."""
        if self._loads.many:
            return bool(self._many.room(now_s, batch_alone=self._first_alone(now_s)).any())
        return any(self._takes_next(load, now_s) for load in self._loads.ordered)

    def view(self, side: PrefillView | None, now_s: float, *, batch: bool = False) -> WorkerView:
        """Describe the workers as they are now, as interactive or as batch requests see them."""
        awaited = self._disagg.pool.awaited_blocks if self._disagg.pool.jobs else None
        alone = self._alone(now_s) if batch else None
        if alone is not None and side is not None:
            side = self._disagg.for_batch(side, alone=alone)
        if self._loads.many:
            return self._many.view(now_s, prefill=side, awaited=awaited, batch_alone=alone)
        return make_worker_view(
            self._loads, self._settings, self._recent, now_s, prefill=side, awaited=awaited, batch_alone=alone
        )

    def next_s(self, now_s: float) -> float:
        """Predict when the next worker will have computed what keeps it from having room; infinite if none has to."""
        if self._loads.many:
            return self._many.next_room_s(now_s, batch_alone=self._first_alone(now_s))
        soonest_s = inf
        for load in self._loads.ordered:
            over = load.pending_tokens(now_s) - self._lookahead_tokens(load, now_s)
            if over > 0:
                soonest_s = min(soonest_s, now_s + over / load.speed.prefill_tokens_per_s)
        return soonest_s

    def congestion(self, routers: int, *, batch: bool, coming: int = 0) -> float:
        """Weigh prefill work by the requests that it delays. Batch requests leave no worker idle for the sake of a cache.

        `coming`: requests that are to be counted with those that wait.
        """
        others = 0 if batch else max((len(self._queue.interactive) + coming) * routers - 1, 0)
        return self._settings.thrift + self._settings.congestion * others / len(self._loads.ordered)

    def _takes_next(self, load: WorkerLoad, now_s: float) -> bool:
        if len(self._queue.interactive):
            return has_room(load, self._settings, now_s)
        return has_batch_room(load, self._settings, load.pending_tokens(now_s), alone=self._alone(now_s))

    def _alone(self, now_s: float) -> bool:
        """Return whether batch requests have the pool for themselves."""
        return not len(self._queue.interactive) and not self._presence.expected(now_s)

    def _first_alone(self, now_s: float) -> bool | None:
        """Return the same if a batch request is the first of those that wait, else None."""
        return None if len(self._queue.interactive) else self._alone(now_s)

    def _lookahead_tokens(self, load: WorkerLoad, now_s: float) -> float:
        """Return the pending prefill, in tokens, below which this worker may get the first of those that wait."""
        if len(self._queue.interactive):
            return lookahead_tokens(load, self._settings)
        return batch_lookahead_tokens(load, self._settings, alone=self._alone(now_s))
