"""The gauges of one router session: age of the window, index and prefill queue."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.router.session import metrics
from headrace.router.session.ports import PoolIndex, SchedulingPort
from headrace.router.session.window import RequestWindow

AGE_EVERY_S = 1.0  # every held request is looked at for it


class SessionGauges:
    """Sets the gauges of one pool. Without an index those of the index are left out."""

    def __init__(
        self,
        pool: str,
        scheduler: SchedulingPort,
        index: PoolIndex | None,
        window: RequestWindow,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._index = index
        self._window = window
        self._wall = wall
        self._age_due_s = 0.0

    def refresh(self, now_s: float) -> None:
        """Set every gauge to the present value; the age of the oldest request once a second."""
        if now_s >= self._age_due_s:
            self._age_due_s = now_s + AGE_EVERY_S
            metrics.OLDEST_S.labels(self._pool).set(self._window.oldest_s(self._wall()))
        metrics.PREFILL_QUEUE.labels(self._pool).set(self._scheduler.queued_prefill_tokens(now_s))
        if self._index is not None:
            metrics.INDEX_READY.labels(self._pool).set(self._index.follower.ready)
            metrics.LAG.labels(self._pool).set(self._index.follower.lag)
            metrics.INDEX_ENTRIES.labels(self._pool).set(len(self._index.entries))
