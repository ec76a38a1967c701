"""Tells which workers have room for the first of those that wait: batch requests take only what interactive ones leave."""

from __future__ import annotations

from headrace.router.placement.costs.cost import batch_lookahead_tokens, has_batch_room, has_room, lookahead_tokens
from headrace.router.placement.fairness.turn_queues import TurnQueues
from headrace.router.placement.interactive_presence import InteractivePresence
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings


class Room:
    """The room of a pool, as the first waiting request of one router finds it."""

    def __init__(self, settings: SchedulerSettings, loads: LoadTable, queue: TurnQueues, presence: InteractivePresence) -> None:
        self._settings = settings
        self._loads = loads
        self._queue = queue
        self._presence = presence

    def takes_next(self, load: WorkerLoad, now_s: float) -> bool:
        """Return whether a worker has room for the first of those that wait: a batch request only if no other one does."""
        if len(self._queue.interactive):
            return has_room(load, self._settings, now_s)
        return has_batch_room(load, self._settings, load.pending_tokens(now_s), alone=self.alone(now_s))

    def alone(self, now_s: float) -> bool:
        """Return whether batch requests have the pool for themselves."""
        return not len(self._queue.interactive) and not self._presence.expected(now_s)

    def lookahead_tokens(self, load: WorkerLoad, now_s: float) -> float:
        """Return the pending prefill, in tokens, below which this worker may get the first of those that wait."""
        if len(self._queue.interactive):
            return lookahead_tokens(load, self._settings)
        return batch_lookahead_tokens(load, self._settings, alone=self.alone(now_s))

    def congestion(self, routers: int, *, batch: bool) -> float:
        """Weigh prefill work by the requests that it delays. Batch requests leave no worker idle for the sake of a cache."""
        others = 0 if batch else max(len(self._queue.interactive) * routers - 1, 0)
        return self._settings.thrift + self._settings.congestion * others / len(self._loads)
