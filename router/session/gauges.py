"""The gauges of one router session: index and prefill queue."""

from __future__ import annotations

from headrace.router.session import metrics
from headrace.router.session.ports import PoolIndex, SchedulingPort


class SessionGauges:
    """Sets the gauges of one pool. Without an index only the prefill queue is shown."""

    def __init__(self, pool: str, scheduler: SchedulingPort, index: PoolIndex | None) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._index = index

    def refresh(self, now_s: float) -> None:
        """Set every gauge to the present value."""
        metrics.PREFILL_QUEUE.labels(self._pool).set(self._scheduler.queued_prefill_tokens(now_s))
        if self._index is not None:
            metrics.INDEX_READY.labels(self._pool).set(self._index.follower.ready)
            metrics.LAG.labels(self._pool).set(self._index.follower.lag)
            metrics.INDEX_ENTRIES.labels(self._pool).set(len(self._index.entries))
