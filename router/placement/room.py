"""Room for waiting requests: which workers have some, which router may use it now, and which rows are brought up to date first.

The workers of a small pool are looked at one by one, those of a large one as arrays (`worker_registry.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf, log2

import xxhash

from headrace.broker.messages.events import LoadReport
from headrace.router.index.types import CacheView
from headrace.router.placement.cost import (
    CostMatrix,
    CostRow,
    batch_lookahead_tokens,
    has_batch_room,
    has_room,
    lookahead_tokens,
    make_worker_view,
)
from headrace.router.placement.disagg_planner import DisaggPlanner
from headrace.router.placement.fair_queue import ClassGroup
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import PrefillView
from headrace.router.placement.turn_queues import TurnQueues
from headrace.router.placement.worker_registry import WorkerRegistry
from headrace.router.placement.worker_view import WorkerView

# Tells whether interactive work is there or may be due: some waits or runs in the pool, or did so within the last seconds.
#
# Batch requests are placed with regard for interactive ones only then. Placements of other routers show in the load reports.


class InteractivePresence:
    """Keeps when interactive work was last seen. Times are seconds of the scheduler's clock."""

    def __init__(self, quiet_s: float) -> None:
        """`quiet_s`: without any for so long, none is thought to be due."""
        self._quiet_s = quiet_s
        self._seen_s = -inf

    def see(self, now_s: float) -> None:
        self._seen_s = now_s

    def on_report(self, report: LoadReport, now_s: float) -> None:
        if report.running > report.batch:
            self._seen_s = now_s

    def expected(self, now_s: float) -> bool:
        """Return whether interactive work is there, or was within the last `quiet_s`."""
        return now_s - self._seen_s < self._quiet_s


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
        return not len(self._queue.interactive) and not self._presence.expected(now_s)

    def _first_alone(self, now_s: float) -> bool | None:
        return None if len(self._queue.interactive) else self._alone(now_s)

    def _lookahead_tokens(self, load: WorkerLoad, now_s: float) -> float:
        """Return the pending prefill, in tokens, below which this worker may get the first of those that wait."""
        if len(self._queue.interactive):
            return lookahead_tokens(load, self._settings)
        return batch_lookahead_tokens(load, self._settings, alone=self._alone(now_s))


# Backoff between routers: with several of them, each waits a turn before it uses the new room of a worker.
#
# All routers of a pool see the same report at about the same time, and each has a request for that worker. If all placed at
# once, the worker would get several requests where it had room for one; and the shortest work of all should go first, not the
# shortest of the router that is quickest. So each waits before it uses a worker's new room, the longer the more work it means
# to place, and among equals in an order drawn from the worker's name and the number of its report; the others hear of the
# first placement (a backoff like that of a shared wire, with the priority as the time). Room opens well before the engine
# runs dry, so the wait costs nothing while the pool is busy; a worker that has had room for longer is open to all at once.

_SHORT_S = 0.02  # work that waits one turn; twice as much waits about one more


class RouterBackoff:
    """Keeps the turns of one router."""

    def __init__(self, name: str, turn_s: float) -> None:
        self._name = name
        self._turn_s = turn_s
        self.next_s = float("inf")  # when its next turn comes

    def note_rooms(self, room: Sequence[bool], loads: LoadTable, now_s: float) -> None:
        self.next_s = float("inf")
        for load in loads:
            self.note_room(load, room=room[load.column], now_s=now_s)

    @staticmethod
    def note_room(load: WorkerLoad, *, room: bool, now_s: float) -> None:
        """Note whether this worker has room now. Room that opened while nothing waited here is open to all routers."""
        if not room:
            load.opened_s = None
        elif load.opened_s is None:
            load.opened_s = now_s

    def note_no_room(self, loads: LoadTable) -> None:
        self.next_s = float("inf")
        for load in loads:
            load.opened_s = None

    def must_wait(self, load: WorkerLoad, routers: Sequence[str], service_s: float, now_s: float) -> bool:
        if len(routers) < 2 or load.opened_s is None:
            return False
        turns = log2(1.0 + service_s / _SHORT_S) + self._place(load, routers) / len(routers)
        mine_s = load.opened_s + self._turn_s * turns
        if now_s >= mine_s - 1e-9:
            return False
        self.next_s = min(self.next_s, mine_s)
        return True

    def _place(self, load: WorkerLoad, routers: Sequence[str]) -> int:
        number = load.report.n if load.report is not None else 0
        key = f"{load.info.worker} {number} ".encode()
        own = xxhash.xxh3_64_intdigest(key + self._name.encode())
        return sum(xxhash.xxh3_64_intdigest(key + name.encode()) > own for name in routers if name != self._name)


# Brings the rows of waiting requests up to date after changes in the workers' caches, as much as a decision has time for.
#
# A block that all requests share is stored for the first time, and every row in the window is out of date. What a decision
# looks at is up to date always; the others follow, some with every decision, and until then only the backlog counts their
# tokens as they were.

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
        stale = self._view.stale()
        if stale:
            self.requests([one.id for group in groups for one in group.requests if one.id in stale])

    def requests(self, ids: Iterable[str]) -> None:
        view = self._view
        for request_id in ids:
            changed = view.refresh(request_id)
            if changed is None or changed:
                row = self._window.refresh(request_id, view.overlaps(request_id), changed)
                if row is not None:
                    self._queue.update(request_id, least_uncached(row, self._window))


def least_uncached(row: CostRow, window: CostMatrix) -> float:
    uncached = window.uncached[row.number]
    if len(uncached) > _FEW:
        return float(uncached.min())
    return min(uncached.tolist(), default=float(row.request.tokens))  # quicker for the usual few
