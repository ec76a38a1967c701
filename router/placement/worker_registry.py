"""The workers of a pool as one router knows them: their leases, load, speeds and share of recent work. Sans-io.

Leases add and remove workers; load reports and job events say what they have to do, and how fast they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum, auto
from math import fsum, inf

import numpy as np

from headrace.broker.messages.events import EventKind, JobEvent, LoadReport
from headrace.router.placement.admission import PoolSpeed
from headrace.router.placement.calibration import Calibration
from headrace.router.placement.cost import FEW, STEP_TOKENS, RecentWork, batch_lookahead_tokens, lookahead_tokens
from headrace.router.placement.disagg_planner import DisaggPlanner
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import PrefillView
from headrace.router.placement.types import WorkerInfo
from headrace.router.placement.worker_view import Bools, Floats, WorkerView

# Counts the workers that a pool has lost and that are due back.
#
# A worker that leaves without having announced it has died, and its supervisor starts another in its place. That takes about
# as long as the start of the one that died, which its lease tells. Streams that were on it wait for that only if it takes
# less than what they may pause for.

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
        self._expire(now_s)
        if wait_s := due_back_s(start_s):
            self._until_s.append(now_s + wait_s)

    def join(self) -> None:
        """Note a new worker. It replaces the one that was lost first of those still awaited."""
        if self._until_s:
            self._until_s.pop(0)

    def due(self, now_s: float) -> int:
        self._expire(now_s)
        return len(self._until_s)

    def _expire(self, now_s: float) -> None:
        self._until_s = [until_s for until_s in self._until_s if now_s < until_s]


# Describes the workers of a large pool: arrays that are kept, in which only what has changed since is computed anew.
#
# A decision about hundreds of workers looks at few of them that have changed since the last one, and describing each takes
# some microseconds. What depends on the time is computed from the arrays, for all at once. `make_worker_view` describes a
# small pool in less time; the numbers are the same to the last bit, and `tests/unit/router/placement/test_worker_registry.py`
# compares them.


class Figure(IntEnum):
    """The rows of the table: what is known of each worker, whatever the time."""

    QUEUED = 0  # prompt tokens, as reported
    REPORTED_S = auto()
    RATE = auto()  # prompt tokens per second
    PLACED = auto()  # prompt tokens on their way
    TOKEN_S = auto()
    STEP_S = auto()
    RUNNING = auto()
    LOOKAHEAD = auto()  # pending tokens below which it has room, if it is open
    OPEN = auto()
    SLOT_WAIT_S = auto()
    BLOCKS_FREE = auto()
    BATCH_LOOKAHEAD = auto()  # the last four as batch requests see them while there are interactive ones
    BATCH_OPEN = auto()
    BATCH_SLOT_WAIT_S = auto()
    BATCH_BLOCKS_FREE = auto()


class ManyWorkers:
    """The workers of one pool. It is for one of which `LoadTable.many` is true."""

    def __init__(self, loads: LoadTable, settings: SchedulerSettings, recent: RecentWork) -> None:
        self._loads = loads
        self._settings = settings
        self._recent = recent
        self._version = -1
        self._table: Floats = np.zeros((len(Figure), 0))
        self._shares: Floats = np.zeros((2, 0))  # recent tokens and requests
        self._columns: dict[str, int] = {}
        self._unevenness: Floats | None = None  # None: to be computed

    def view(
        self,
        now_s: float,
        *,
        prefill: PrefillView | None = None,
        awaited: Callable[[str], int] | None = None,
        batch_alone: bool | None = None,
    ) -> WorkerView:
        table, batch = self._current(), batch_alone is not None
        pending = self._pending(now_s)
        free = table[Figure.BATCH_BLOCKS_FREE if batch else Figure.BLOCKS_FREE].copy()
        if awaited is not None:
            free -= [awaited(name) for name in self._loads.names]
        running = table[Figure.RUNNING]
        return WorkerView(
            wait_s=pending / table[Figure.RATE] + table[Figure.BATCH_SLOT_WAIT_S if batch else Figure.SLOT_WAIT_S],
            pending=pending,
            token_s=table[Figure.TOKEN_S].copy(),
            step_s=table[Figure.STEP_S].copy(),
            room=self._room(pending, batch_alone),
            blocks_free=free,
            running=running.astype(np.intp),
            disturbed=self._settings.disturbance * running,
            unevenness=self._uneven(),
            prefill=prefill,
        )

    def room(self, now_s: float, *, batch_alone: bool | None = None) -> Bools:
        self._current()
        return self._room(self._pending(now_s), batch_alone)

    def totals(self, now_s: float) -> tuple[float, float]:
        table = self._current()
        return float(self._pending(now_s).sum()), float(table[Figure.RATE].sum())

    def next_room_s(self, now_s: float, *, batch_alone: bool | None = None) -> float:
        """Predict when the next worker will have computed what keeps it from having room; infinite if none has to."""
        table = self._current()
        over = self._pending(now_s) - table[self._lookahead(batch_alone)]
        return float(np.where(over > 0, now_s + over / table[Figure.RATE], np.inf).min(initial=np.inf))

    # Parts.

    def _room(self, pending: Floats, batch_alone: bool | None) -> Bools:
        table = self._table
        open_: Bools = table[Figure.OPEN if batch_alone is None else Figure.BATCH_OPEN] > 0.0
        if batch_alone is None and self._settings.binding == "early":
            return open_
        open_ &= pending < table[self._lookahead(batch_alone)]
        return open_

    @staticmethod
    def _lookahead(batch_alone: bool | None) -> Figure:
        return Figure.BATCH_LOOKAHEAD if batch_alone is False else Figure.LOOKAHEAD

    def _pending(self, now_s: float) -> Floats:
        table = self._table
        done = (now_s - table[Figure.REPORTED_S]) * table[Figure.RATE]
        left = np.maximum(0.0, table[Figure.QUEUED] - done)
        pending: Floats = np.where(table[Figure.QUEUED] > 0.0, left, 0.0) + table[Figure.PLACED]
        return pending

    def _uneven(self) -> Floats:
        strength = self._settings.balance
        if strength <= 0:
            return np.ones(len(self._loads))
        recent, columns = self._recent, self._columns
        if recent.touched:
            for worker in recent.touched:
                self._shares[:, columns[worker]] = recent.share(worker)
            recent.touched.clear()
            self._unevenness = None
        if self._unevenness is None:
            tokens, requests = self._shares
            tokens_each = max(fsum(tokens.tolist()) / (fsum(requests.tolist()) or 1.0), 1.0)
            factor = np.ones(len(columns))
            for sums, unit, weight in ((tokens, FEW * tokens_each, strength), (requests, FEW, 2 * strength)):
                share = sums / recent.scale
                mean = fsum(share.tolist()) / len(share)
                factor *= np.where(share > mean, 1.0 + weight * (share - mean) / (mean + unit), 1.0)
            self._unevenness = factor
        return self._unevenness

    def _current(self) -> Floats:
        loads = self._loads
        if self._version != loads.version:
            self._version = loads.version
            self._table = np.zeros((len(Figure), len(loads)))
            self._shares = np.zeros((2, len(loads)))
            self._columns = {name: column for column, name in enumerate(loads.names)}
            for column, name in enumerate(loads.names):
                self._shares[:, column] = self._recent.share(name)
            self._recent.touched.clear()
            self._unevenness = None
        for load in [load for load in loads.ordered if not load.described]:
            self._table[:, load.column] = self._describe(load)
            load.described = True
        return self._table

    def _describe(self, load: WorkerLoad) -> tuple[float, ...]:
        settings, info, speed, report, busy = self._settings, load.info, load.speed, load.report, load.running
        rate, decode_s = speed.prefill_tokens_per_s, speed.per_decode_s * busy
        taken = busy >= info.slots or load.on_trial
        if settings.binding == "early":
            open_ = not info.draining
        else:
            open_ = load.takes_one_more(settings.spare_slots, settings.lookahead_s)
        return (
            report.queued_prefill_tokens if report is not None else 0.0,
            load.reported_s,
            rate,
            load.placed_tokens,
            1.0 / rate + decode_s / (info.step_tokens or STEP_TOKENS),
            speed.base_s + decode_s,
            busy,
            lookahead_tokens(load, settings),
            open_,
            load.slot_wait_s() if taken else 0.0,
            load.blocks_free() if busy else inf,
            batch_lookahead_tokens(load, settings, alone=False),
            load.takes_batch(settings.batch_reserve),
            load.slot_wait_s(batch=True) if taken else 0.0,
            (load.blocks_free(batch=True) if busy else inf) - settings.batch_reserve * info.blocks,
        )


_MOST_RUNNING = 65_536
_MOST_EARLY = 8192  # seconds of events at full speed, and an announcement is late by milliseconds


class WorkerRegistry:
    """Keeps the workers of one pool. Times are seconds of the scheduler's clock."""

    def __init__(self, settings: SchedulerSettings, loads: LoadTable, disagg: DisaggPlanner, lost: LostWorkers) -> None:
        self._settings = settings.calibration
        self._calibrations: dict[str, Calibration] = {}  # by fleet: workers of one are alike, those of two are not
        self.recent = RecentWork(settings.balance_horizon)
        self._loads = loads
        self.many = ManyWorkers(loads, settings, self.recent)
        self._disagg = disagg
        self._lost = lost
        self._running: OrderedDict[str, tuple[str, float]] = OrderedDict()  # id → worker, started
        # What workers have told of requests that are in no load, by id and attempt: nothing orders their messages and those of
        # other routers, so a request may have ended before its placement is announced.
        self._early: OrderedDict[tuple[str, int], EventKind] = OrderedDict()

    # Leases.

    def put(self, info: WorkerInfo, now_s: float) -> bool:
        """Add a worker, or update one. Return False if its lease says nothing new."""
        known = self._loads.get(info.worker) or self._disagg.pool.get(info.worker)
        if known is not None and known.info == info:
            return False
        if known is None and info.serves:
            self._lost.join()
        if known is not None and known.info.serves != info.serves:
            self._drop(info.worker, now_s)
        speed = self._calibration(info.fleet).estimate(info.worker)
        self._disagg.put_worker(info, speed)
        if info.serves:
            others = [load.info.worker for load in self._loads]
            if self._loads.put(info, speed):
                self.recent.join(info.worker, others)
        return True

    def remove(self, worker: str, now_s: float) -> bool:
        load = self._loads.get(worker)
        if not self._drop(worker, now_s):
            return False
        if load is not None and not load.info.draining:
            self._lost.lose(now_s, load.info.start_s)
        for calibration in self._calibrations.values():
            calibration.remove(worker)
        self._disagg.remove_worker(worker)
        return True

    def _drop(self, worker: str, now_s: float) -> bool:
        self.recent.remove(worker)
        return self._loads.remove(worker) is not None or self._disagg.pool.remove(worker, now_s) is not None

    # Load.

    def on_report(self, report: LoadReport, now_s: float) -> WorkerLoad | None:
        load = self._loads.get(report.worker)
        known = load or self._disagg.pool.get(report.worker)
        if known is None:
            return None
        calibration = self._calibration(known.info.fleet)
        if calibration.observe(report) and calibration.young:
            self._set_speed_of_young(calibration)
        speed = calibration.estimate(report.worker)
        if self._disagg.known:
            self._disagg.on_report(report, speed, now_s)
        if load is not None:
            load.on_report(report, now_s)
            load.full_s = None
            load.speed = speed
            load.described = False
        return load

    def _set_speed_of_young(self, calibration: Calibration) -> None:
        for worker in calibration.young:
            if (load := self._loads.get(worker)) is not None and (speed := calibration.estimate(worker)) != load.speed:
                load.speed = speed
                load.described = False

    def _calibration(self, fleet: str) -> Calibration:
        found = self._calibrations.get(fleet)
        if found is None:
            found = self._calibrations[fleet] = Calibration(self._settings)
        return found

    @property
    def prefill_tokens_per_s(self) -> float:
        """The rate of a worker of the quickest fleet; that of the settings while nothing is known."""
        speeds = [calibration.pool() for calibration in self._calibrations.values()]
        return max((speed.prefill_tokens_per_s for speed in speeds), default=self._settings.prefill_tokens_per_s)

    def placed_elsewhere(self, event: JobEvent, now_s: float) -> WorkerLoad | None:
        load = self._loads.get(event.worker)
        if load is None:
            return None
        self.recent.add(event.worker, event.uncached or event.tokens)
        told = self._early.pop((event.id, event.attempt), None)
        if told not in (None, "started", "prefilled"):  # it has ended
            return load
        if event.prefill:
            load.place(event.id, tokens=0, blocks=0, now_s=now_s)
            if told != "prefilled":
                self._disagg.placed_elsewhere(event, now_s)
        else:
            load.place(event.id, tokens=event.uncached or event.tokens, blocks=event.blocks, now_s=now_s)
        if told is not None:
            load.started(event.id, now_s)
        return load

    def on_event(self, event: JobEvent, now_s: float) -> None:
        if event.kind == "started":
            load = self._loads.get(event.worker)
            if load is not None:
                if not load.started(event.id, now_s):
                    self._note_early(event)
                self._running[event.id] = (event.worker, now_s)
                while len(self._running) > _MOST_RUNNING:
                    self._running.popitem(last=False)
            return
        self._disagg.pool.close(event.id, now_s)
        if event.kind != "prefilled":
            self._ended(event, now_s)
        elif (event.id, event.attempt) in self._early:
            self._note_early(event)

    def _note_early(self, event: JobEvent) -> None:
        self._early[event.id, event.attempt] = event.kind
        while len(self._early) > _MOST_EARLY:
            self._early.popitem(last=False)

    def _ended(self, event: JobEvent, now_s: float) -> None:
        load, started = self._loads.get(event.worker), self._running.pop(event.id, None)
        if load is not None:
            if load.remove_entry(event.id) is None:
                self._note_early(event)
            if event.kind == "settled" and started is not None and started[0] == event.worker:
                load.note_residency(now_s - started[1])

    def pool_speed(self, routers: int, now_s: float) -> PoolSpeed:
        """Return what this router may count on. Its window holds about as much as each other one, and all use these workers."""
        pending, speed = self.many.totals(now_s) if self._loads.many else self._totals(now_s)
        pending += self._disagg.pool.queued_tokens(now_s)
        speed += self._disagg.speed()
        return PoolSpeed(tokens_per_s=speed / routers, pending_tokens=pending / routers)

    def _totals(self, now_s: float) -> tuple[float, float]:
        pending = sum(load.pending_tokens(now_s) for load in self._loads.ordered)
        return pending, sum(load.speed.prefill_tokens_per_s for load in self._loads.ordered)
