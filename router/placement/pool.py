"""The workers of a pool as one router knows them: leases, load, speeds, prefill workers, guards of first tokens, and room.

Sans-io. Leases add and remove workers; load reports and job events say what they have to do, and how fast they are.  The
workers of a small pool are looked at one by one, those of a large one as arrays (`ManyWorkers`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from math import fsum, inf, log2

import numpy as np
import xxhash

from headrace.broker.codec import unpack_u64
from headrace.broker.messages.events import EventKind, JobEvent, LoadReport
from headrace.router.index.types import CacheView, Overlap
from headrace.router.placement.calibration import Calibration
from headrace.router.placement.cost import (
    FEW,
    STEP_TOKENS,
    RecentWork,
    batch_lookahead_tokens,
    has_batch_room,
    has_room,
    lookahead_tokens,
    make_worker_view,
)
from headrace.router.placement.disagg_planner import DisaggPlan, DisaggPlanner
from headrace.router.placement.first_tokens import FirstTokens
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import PrefillView
from headrace.router.placement.types import Placement, WorkerInfo
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
# small pool in less time; the numbers are the same to the last bit, and `tests/unit/router/placement/test_pool.py`
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
    """Keeps the turns of one router. `routers`: the live ones of its pool, this one included, which share what waits."""

    def __init__(self, name: str, turn_s: float) -> None:
        self._name = name
        self.routers: tuple[str, ...] = (name,)
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

    def must_wait(self, load: WorkerLoad, service_s: float, now_s: float) -> bool:
        if len(self.routers) < 2 or load.opened_s is None:
            return False
        turns = log2(1.0 + service_s / _SHORT_S) + self._place(load) / len(self.routers)
        mine_s = load.opened_s + self._turn_s * turns
        if now_s >= mine_s - 1e-9:
            return False
        self.next_s = min(self.next_s, mine_s)
        return True

    def _place(self, load: WorkerLoad) -> int:
        number = load.report.n if load.report is not None else 0
        key = f"{load.info.worker} {number} ".encode()
        own = xxhash.xxh3_64_intdigest(key + self._name.encode())
        return sum(xxhash.xxh3_64_intdigest(key + name.encode()) > own for name in self.routers if name != self._name)


_MOST_RUNNING = 65_536
_MOST_EARLY = 8192  # seconds of events at full speed, and an announcement is late by milliseconds


@dataclass(frozen=True, slots=True)
class PoolSpeed:
    tokens_per_s: float  # prompt tokens that all workers together compute; 0 = not known (there is no worker, say)
    pending_tokens: float = 0.0  # placed and not yet computed

    def wait_s(self, tokens: float) -> float:
        """Predict the wait until the prefill of a request with so many tokens before it; 0 if the speed is not known."""
        return (self.pending_tokens + tokens) / self.tokens_per_s if self.tokens_per_s > 0 else 0.0


class Pool:
    """Keeps the workers of one pool for one router. Times are seconds of the scheduler's clock."""

    def __init__(self, settings: SchedulerSettings, view: CacheView, *, name: str) -> None:
        self.name = name  # of the router
        self.routers = 1  # that share what waits
        self.settings = settings
        self.loads = LoadTable()
        self.disagg = DisaggPlanner(settings, self.loads, view)
        self.first_tokens = FirstTokens(self.loads, settings)
        self.recent = RecentWork(settings.balance_horizon)
        self.many = ManyWorkers(self.loads, settings, self.recent)
        self.lost = LostWorkers()
        self.backoff = RouterBackoff(name, settings.turn_s)
        self._view = view
        self._calibrations: dict[str, Calibration] = {}  # by fleet: workers of one are alike, those of two are not
        self._interactive_s = -inf  # when interactive work was last seen
        self._running: OrderedDict[str, tuple[str, float]] = OrderedDict()  # id → worker, started
        # What workers have told of requests that are in no load, by id and attempt: nothing orders their messages and those of
        # other routers, so a request may have ended before its placement is announced.
        self._early: OrderedDict[tuple[str, int], EventKind] = OrderedDict()

    # Leases.

    def put_worker(self, info: WorkerInfo, now_s: float) -> bool:
        """Add a worker, or update one. Return False if its lease says nothing new."""
        known = self.loads.get(info.worker) or self.disagg.pool.get(info.worker)
        if known is not None and known.info == info:
            return False
        if known is None and info.serves:
            self.lost.join()
        if known is not None and known.info.serves != info.serves:
            self._drop(info.worker, now_s)
        speed = self._calibration(info.fleet).estimate(info.worker)
        self.disagg.put_worker(info, speed)
        if info.serves:
            others = [load.info.worker for load in self.loads]
            if self.loads.put(info, speed):
                self.recent.join(info.worker, others)
        return True

    def remove_worker(self, worker: str, now_s: float) -> bool:
        """Remove a worker. Return False if it is unknown. The movers take care of requests on their way there."""
        self.first_tokens.remove_worker(worker)
        load = self.loads.get(worker)
        if not self._drop(worker, now_s):
            return False
        if load is not None and not load.info.draining:
            self.lost.lose(now_s, load.info.start_s)
        for calibration in self._calibrations.values():
            calibration.remove(worker)
        self.disagg.remove_worker(worker)
        return True

    def _drop(self, worker: str, now_s: float) -> bool:
        self.recent.remove(worker)
        return self.loads.remove(worker) is not None or self.disagg.pool.remove(worker, now_s) is not None

    def set_routers(self, names: Iterable[str]) -> None:
        """Set the live routers of this pool; this one is always counted."""
        self.backoff.routers = tuple(sorted({*names, self.name}))
        self.routers = len(self.backoff.routers)
        if self.routers == 1:
            self.backoff.note_no_room(self.loads)

    # Load.

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """Learn from a load report. That of an unknown worker is ignored: its lease comes first."""
        load = self.loads.get(report.worker)
        known = load or self.disagg.pool.get(report.worker)
        if known is None:
            return
        calibration = self._calibration(known.info.fleet)
        if calibration.observe(report) and calibration.young:
            self._set_speed_of_young(calibration, report.worker)
        speed = calibration.estimate(report.worker)
        if self.disagg.known:
            self.disagg.on_report(report, speed, now_s)
        if load is None:
            return
        load.on_report(report, now_s)
        load.full_s = None
        load.speed = speed
        load.described = False
        if report.running > report.batch:
            self._interactive_s = now_s
        self._note_room(load, now_s)

    def _set_speed_of_young(self, calibration: Calibration, but: str) -> None:
        """Judge the young workers anew, `but` one, because they are still judged by the others, too."""
        for worker in calibration.young:
            if worker == but:
                continue
            if (load := self.loads.get(worker)) is not None and (speed := calibration.estimate(worker)) != load.speed:
                load.speed = speed
                load.described = False

    def _calibration(self, fleet: str) -> Calibration:
        found = self._calibrations.get(fleet)
        if found is None:
            found = self._calibrations[fleet] = Calibration(self.settings.calibration)
        return found

    def _note_room(self, load: WorkerLoad, now_s: float) -> None:
        if self.routers > 1:  # a single router takes no turns
            self.backoff.note_room(load, room=has_room(load, self.settings, now_s), now_s=now_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The rate of a worker of the quickest fleet; that of the settings while nothing is known."""
        rates = [calibration.pool().prefill_tokens_per_s for calibration in self._calibrations.values()]
        return max(rates, default=self.settings.calibration.prefill_tokens_per_s)

    def speed(self, now_s: float) -> PoolSpeed:
        """Return what this router may count on. Its window holds about as much as each other one, and all use these workers."""
        if self.loads.many:
            pending, speed = self.many.totals(now_s)
        else:
            pending = speed = 0.0
            for load in self.loads.ordered:
                pending += load.pending_tokens(now_s)
                speed += load.speed.prefill_tokens_per_s
        if self.disagg.known:
            pending += self.disagg.pool.queued_tokens(now_s)
            speed += self.disagg.speed()
        return PoolSpeed(tokens_per_s=speed / self.routers, pending_tokens=pending / self.routers)

    def expire(self, now_s: float) -> None:
        """Forget placements that were never confirmed."""
        self.loads.expire(now_s, after_s=self.settings.entry_expiry_s)
        if self.disagg.pool.jobs:
            self.disagg.pool.expire(now_s)

    # Placements.

    def place(
        self,
        placement: Placement,
        load: WorkerLoad,
        overlap: Overlap,
        plan: DisaggPlan,
        overlaps: Mapping[str, Overlap],
        now_s: float,
    ) -> None:
        """Count a placement with the load of its worker, and predict the blocks that it will hold."""
        request = placement.request
        yields = request.batch and not placement.kept
        if plan.remote:
            load.place(request.id, tokens=0, blocks=0, now_s=now_s, yields=yields)
            self.disagg.place(request, load, plan, overlaps, now_s)
        else:
            blocks = len(request.chain) - overlap.blocks
            load.place(request.id, tokens=placement.uncached, blocks=blocks, now_s=now_s, limit=placement.limit, yields=yields)
        self.recent.add(placement.worker, placement.uncached)
        # A worker without events is known by what was placed on it, so its cached blocks are refreshed as well. Blocks that are
        # computed elsewhere are not there before they are fetched, and then an event says so.
        if not (plan.remote and load.info.kv_events):
            blocks_held = placement.new_blocks if load.info.kv_events else request.chain
            self._view.predict(placement.worker, blocks_held, now_s=now_s)

    def unplace(self, placement: Placement, now_s: float) -> None:
        """Take back a placement on a worker whose queue is full. It gets nothing before its next report."""
        load = self.loads.get(placement.worker)
        if load is not None:
            load.remove_entry(placement.request.id)
            load.full_s = now_s
            load.described = False
        self.disagg.pool.close(placement.request.id, now_s)

    # Events.

    def on_event(self, event: JobEvent, now_s: float) -> None:
        if event.kind == "placed":
            if event.by != self.name:
                self._placed_elsewhere(event, now_s)
            return
        if event.kind == "started":
            self._started(event, now_s)
        else:
            if self.disagg.pool.jobs:
                self.disagg.pool.close(event.id, now_s)
            if event.kind != "prefilled":
                self._ended(event, now_s)
            elif (event.id, event.attempt) in self._early:
                self._note_early(event)
        self.first_tokens.on_event(event, now_s)

    def _placed_elsewhere(self, event: JobEvent, now_s: float) -> None:
        self.first_tokens.placed_elsewhere(event, now_s)
        load = self.loads.get(event.worker)
        if load is None:
            return
        self.recent.add(event.worker, event.uncached or event.tokens)
        told = self._early.pop((event.id, event.attempt), None)
        if told in (None, "started", "prefilled"):  # else it has ended
            self._note_on_way(event, load, told, now_s)
        self._note_room(load, now_s)
        if event.hashes and not (event.prefill and load.info.kv_events):
            self._view.predict(event.worker, unpack_u64(event.hashes), now_s=now_s)

    def _note_on_way(self, event: JobEvent, load: WorkerLoad, told: EventKind | None, now_s: float) -> None:
        if event.prefill:
            load.place(event.id, tokens=0, blocks=0, now_s=now_s)
            if told != "prefilled":
                self.disagg.placed_elsewhere(event, now_s)
        else:
            load.place(event.id, tokens=event.uncached or event.tokens, blocks=event.blocks, now_s=now_s)
        if told is not None:
            load.started(event.id, now_s)

    def _started(self, event: JobEvent, now_s: float) -> None:
        load = self.loads.get(event.worker)
        if load is None:
            return
        if not load.started(event.id, now_s):
            self._note_early(event)
        self._running[event.id] = (event.worker, now_s)
        while len(self._running) > _MOST_RUNNING:
            self._running.popitem(last=False)

    def _note_early(self, event: JobEvent) -> None:
        self._early[event.id, event.attempt] = event.kind
        while len(self._early) > _MOST_EARLY:
            self._early.popitem(last=False)

    def _ended(self, event: JobEvent, now_s: float) -> None:
        load, started = self.loads.get(event.worker), self._running.pop(event.id, None)
        if load is not None:
            if load.remove_entry(event.id) is None:
                self._note_early(event)
            if event.kind == "settled" and started is not None and started[0] == event.worker:
                load.note_residency(now_s - started[1])

    # Room. Batch requests are placed with regard for interactive ones only while some are there, or were within the last
    # seconds. `alone`: None, as interactive requests see the workers; else as batch requests do, and whether there are none of
    # those. Placements of other routers show in the load reports.

    def see_interactive(self, now_s: float) -> None:
        self._interactive_s = now_s

    def alone(self, interactive: int, now_s: float) -> bool:
        """Return whether no interactive request waits, runs or may be due."""
        return not interactive and not now_s - self._interactive_s < self.settings.batch_quiet_s

    def has_room(self, interactive: int, side: PrefillView | None, now_s: float) -> bool:
        """Return whether the first of those that wait can be placed: a batch request only if no other one waits."""
        settings, alone = self.settings, None if interactive else self.alone(0, now_s)
        if self.loads.many:
            room = bool(self.many.room(now_s, batch_alone=alone).any())
        elif alone is None:
            room = any(has_room(load, settings, now_s) for load in self.loads.ordered)
        else:
            pending = ((load, load.pending_tokens(now_s)) for load in self.loads.ordered)
            room = any(has_batch_room(load, settings, tokens, alone=alone) for load, tokens in pending)
        return room or (side is not None and bool(side.room.any() and side.takes.any()))

    def view(self, side: PrefillView | None, now_s: float, *, alone: bool | None = None) -> WorkerView:
        awaited = self.disagg.pool.awaited_blocks if self.disagg.pool.jobs else None
        if alone is not None and side is not None:
            side = self.disagg.for_batch(side, alone=alone)
        if self.loads.many:
            return self.many.view(now_s, prefill=side, awaited=awaited, batch_alone=alone)
        return make_worker_view(self.loads, self.settings, self.recent, now_s, prefill=side, awaited=awaited, batch_alone=alone)

    def next_room_s(self, interactive: int, now_s: float) -> float:
        """Predict when the next worker will have computed what keeps it from having room; infinite if none has to."""
        settings, alone = self.settings, None if interactive else self.alone(0, now_s)
        if self.loads.many:
            return self.many.next_room_s(now_s, batch_alone=alone)
        soonest_s = inf
        for load in self.loads.ordered:
            ahead = lookahead_tokens(load, settings) if alone is None else batch_lookahead_tokens(load, settings, alone=alone)
            over = load.pending_tokens(now_s) - ahead
            if over > 0:
                soonest_s = min(soonest_s, now_s + over / load.speed.prefill_tokens_per_s)
        return soonest_s

    def next_wake_s(self, interactive: int, now_s: float) -> float:
        """Predict when a waiting request may be placed although nothing happens before; infinite if that is not known."""
        wake_s = min(self.backoff.next_s, self.next_room_s(interactive, now_s), self.first_tokens.promises.next_s(now_s))
        return min(wake_s, self.disagg.next_wake_s(now_s)) if self.disagg.pool.ordered else wake_s

    def congestion(self, interactive: int, *, batch: bool = False) -> float:
        """Weigh prefill work by the requests that it delays. Batch requests leave no worker idle for the sake of a cache."""
        others = 0 if batch else max(interactive * self.routers - 1, 0)
        return self.settings.thrift + self.settings.congestion * others / len(self.loads.ordered)
