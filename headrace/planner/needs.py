"""Derives how many workers of a role are needed now: by forecast, by what waits, and by batch deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import ceil, exp, isnan, nan
from typing import Annotated, Any

import msgspec
import numpy as np

from headrace.planner.capacity import FULL, Capacity, Shape, Targets, workers_for
from headrace.planner.forecast import Forecast
from headrace.planner.memory import Learner
from headrace.planner.observe import Observation, OutcomeSight
from headrace.planner.plan import Reason

# Derives from batch work and its deadlines how many workers it needs, and when none has to be started yet.
#
#     required = max over t of B(t) / (R · (t − C))
#
# `B(t)`: requests due within `t` seconds, waiting, claimed and running ones alike; `R`: requests a second of a worker; `C`:
# the seconds that a worker takes to start.

ENOUGH = 0.85  # of a worker: while less is required, batch work sleeps if nothing else needs a worker


def required(backlog: Iterable[tuple[float, int]], *, per_s: float, start_s: float) -> float:
    """Return the workers that are required, as a fraction. What is due before a worker could start counts as due right then."""
    due, most = 0, 0.0
    for left_s, count in sorted(backlog):
        due += max(0, count)
        room_s = max(left_s - start_s, 1.0)
        most = max(most, due / (per_s * room_s))
    return most


def batch_workers(backlog: Iterable[tuple[float, int]], *, per_s: float, start_s: float, awake: bool) -> int:
    """Return whole workers. A pool without one (`awake` False) sleeps until the work is worth a start."""
    wanted = required(backlog, per_s=per_s, start_s=start_s)
    if not awake and wanted < ENOUGH:
        return 0
    return ceil(wanted - 1e-9)


LEAST_WATCHED = 0.5  # of a step: less is no measurement


class DemandSeries(Learner):
    """Arrivals per second, step by step, the oldest first. Times are Unix seconds."""

    def __init__(self, *, step_s: float, keep_s: float) -> None:
        self.step_s = step_s
        self.values: deque[float | None] = deque(maxlen=max(2, int(keep_s / step_s)))
        self.first_s = 0.0  # when the oldest kept step began
        self._count = 0.0
        self._watched_s = 0.0
        self._open_s: float | None = None  # when the open step began

    @property
    def open_s(self) -> float | None:
        """Time at which the open step began, None before the first arrival."""
        return self._open_s

    def add(self, count: int | None, *, since_s: float, until_s: float) -> list[float | None]:
        """Note `count` arrivals in a time, None if that is not known, and return the steps that have closed.

        A clock that went back adds nothing: what is recorded stays.
        """
        if until_s <= since_s:
            return []
        if self._open_s is None:
            self._open_s = since_s - since_s % self.step_s
        if until_s - self._open_s > self.step_s * (self.values.maxlen or 1):  # away for longer than is kept
            self.values.clear()
            self._open_s, self._count, self._watched_s = until_s - until_s % self.step_s, 0.0, 0.0
        rate = None if count is None else max(0, count) / (until_s - since_s)
        closed: list[float | None] = []
        at = max(since_s, self._open_s)
        while until_s >= (end := self._open_s + self.step_s):
            if at < end:
                self._note(rate, end - at)
            closed.append(self._close(self._open_s))
            at = max(at, end)
        if until_s > at:
            self._note(rate, until_s - at)
        return closed

    def _note(self, rate: float | None, seconds: float) -> None:
        if rate is not None:
            self._count += rate * seconds
            self._watched_s += seconds

    def _close(self, open_s: float) -> float | None:
        value = self._count / self._watched_s if self._watched_s >= LEAST_WATCHED * self.step_s else None
        self.values.append(value)
        self._open_s = open_s + self.step_s
        self.first_s = self._open_s - len(self.values) * self.step_s
        self._count = self._watched_s = 0.0
        return value

    def known(self, steps: int) -> list[float]:
        return [value for value in list(self.values)[-steps:] if value is not None]

    def dump(self) -> dict[str, Any]:
        """Return the closed steps as they are stored. The open one is watched anew after a restart."""
        values = np.array([nan if value is None else value for value in self.values], dtype="<f4")
        return {"step_s": self.step_s, "open_s": self._open_s, "values": values.tobytes()}

    def load(self, stored: Mapping[str, Any]) -> None:
        """Take a stored series over, unless its steps are others: then it says nothing here."""
        if stored["step_s"] != self.step_s or stored["open_s"] is None:
            return
        values = np.frombuffer(stored["values"], dtype="<f4").tolist()
        self.values.extend(None if isnan(value) else value for value in values)
        self._open_s = float(stored["open_s"])
        self.first_s = self._open_s - len(self.values) * self.step_s


KEPT = 500
FIRST_OUTPUT = 256.0  # tokens, while no answer has ended
LONG = 0.95


class RecentRequests(Learner):
    """The last requests of a pool, whatever they were: `shape` is None before the first."""

    KEPT = {"_lengths": list[tuple[int, int]], "_outputs": list[int]}

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._outputs: deque[int] = deque(maxlen=KEPT)
        self._waits: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def note(self, seen: Observation) -> None:
        """Record placements and ended requests."""
        for one in seen.placed:
            if one.prompt >= 0 and one.uncached >= 0:
                self._lengths.append((one.prompt, min(one.uncached, one.prompt)))
                self._waits.append((seen.at, one.waited_s))
        self._outputs.extend(tokens for tokens in seen.outputs if tokens >= 0)

    @property
    def shape(self) -> Shape | None:
        """The shape of requests, None while none was seen."""
        if not self._lengths:
            return None
        uncached = sorted(one[1] for one in self._lengths)
        return Shape(
            prompt=sum(one[0] for one in self._lengths) / len(self._lengths),
            uncached=sum(uncached) / len(uncached),
            output=sum(self._outputs) / len(self._outputs) if self._outputs else FIRST_OUTPUT,
            long=float(uncached[min(len(uncached) - 1, ceil(LONG * len(uncached)) - 1)]),
        )

    def wait_s(self, share: float, *, since_s: float) -> float | None:
        """Return the quantile of the waits of requests placed since a time, None if there were too few to tell."""
        waits = sorted(wait for at, wait in self._waits if at >= since_s)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if len(waits) >= 10 else None


# Moves the quantile of the forecast that workers are planned for by how many requests really miss their targets.
#
# How much headroom a load needs is not known before: bursts that come sooner than a worker can start are late at every
# quantile, and answers of two tokens are late in one step. So the quantile goes up by each late request and down a little by
# every one, and settles where somewhat fewer are late than may be (as in adaptive conformal inference, Gibbs and Candès
# 2021). What many late requests of one look add is bounded: a burst is over before it could teach anything.

AIM = 0.7  # of the share that may be late
GAIN = 1e-5  # by which a late request moves the quantile, divided by the share that may be late
MOST_UP = 0.003  # at one look
LOWEST, HIGHEST = 0.5, 0.98  # below the median it would be no headroom
SHOWN = 0.001  # a smaller change is none


class LiveConfidence(Learner):
    """The quantile of one pool."""

    KEPT = {"value": float}

    def __init__(self, first: float, targets: Targets, *, moves: bool) -> None:
        """`first`: the quantile at the beginning, and for ever unless it `moves`."""
        self.value = first
        self._exact = first
        self._targets = targets
        self._moves = moves

    def note(self, ended: Iterable[OutcomeSight]) -> bool:
        """Learn from the requests that have ended since the last look. Returns whether `value` has changed."""
        if not self._moves:
            return False
        count = late = 0
        for one in ended:
            count += 1
            late += one.ttft_s > self._targets.ttft_s or one.itl_s > self._targets.itl_s
        miss = self._targets.miss
        change = min(MOST_UP, GAIN / miss * (late - AIM * miss * count))
        self._exact = min(max(HIGHEST, self.value), max(min(LOWEST, self.value), self._exact + change))
        if abs(self._exact - self.value) < SHOWN:
            return False
        self.value = self._exact
        return True

    def load(self, stored: Mapping[str, Any]) -> None:
        value = float(stored["value"])
        if self._moves and LOWEST <= value <= HIGHEST:
            self.value = self._exact = value


# Decides when a planner keeps the workers that the highest load of the last day needs, because bursts come sooner than
# starts.
#
# Two signs tell it, each as a share of the requests of the last day:
#
# - those that really missed a target; - those that would be late in a *rehearsal*: the same arrivals with workers that are
# started only when the load is there, each a start-up later. Forecasts see some bursts, and so a multiple of what may be late
# is allowed here. Slow starts show in it after the first bursts, while it is still luck whether a forecast saw them.
#
# Keeping begins where many were really late, or where some were and the rehearsal says that more will be. The rehearsal alone
# does not do: it calls waves bursts, which forecasts do see. Keeping ends below a tenth of that. A minute more of a start-up
# makes bursts late that were none before: this is why attainment falls off a cliff, and why the static number is the cheaper
# one beyond it.

LATE_LIMIT = 3.0  # times the share that may miss: really late
REHEARSED_LIMIT = 12.0  # times that share: late without any forecast, where more than that share was really late
END = 0.1  # of the limits, below which keeping ends: the requests of a quiet hour say nothing of the next burst
LEAST_REQUESTS = 1000.0  # fewer say nothing of a share of one in a hundred
LOAD_STEPS = 4  # whose mean is the load: one step alone is noise
MARGIN = 1.1  # of the highest load: the next burst may be higher
PEAK_HOURS = 24
HOUR_S = 3600.0
HELD_START_UPS = 2.0


class Rehearsal(Learner):
    """A pool without forecasts, as a flow: its workers follow the load a start-up late. Times are seconds of its own."""

    KEPT = {
        **dict.fromkeys(("late", "_queue", "_up_s", "_now_s"), float),
        "workers": Annotated[int, msgspec.Meta(ge=1)],
        "_starting": list[float],
    }

    def __init__(self) -> None:
        self.workers = 1
        self.late = 0.0  # requests
        self._queue = 0.0
        self._starting: deque[float] = deque()
        self._now_s = self._up_s = 0.0

    def step(self, arrived: float, need: int, capacity: Capacity, *, seconds: float, start_s: float) -> None:
        """Pass one step in which so many arrived and so many workers would do."""
        self._now_s += seconds
        while self._starting and self._starting[0] <= self._now_s:
            self._starting.popleft()
            self.workers += 1
        room = self.workers * capacity.per_s * capacity.slack_s  # that may wait
        if self._queue > room:
            rate = arrived / seconds + self._queue / max(start_s, seconds)
            need = max(need, ceil(rate / (FULL * capacity.per_s)))
        if need > self.workers + len(self._starting):
            self._starting.extend([self._now_s + start_s] * (need - self.workers - len(self._starting)))
            self._up_s = self._now_s
        elif not self._starting and self._now_s - self._up_s >= HELD_START_UPS * start_s:
            self.workers = max(1, need)
        self._queue = max(0.0, self._queue + arrived - self.workers * capacity.per_s * seconds)
        began = self._now_s > HELD_START_UPS * start_s  # before, it has fewer workers than there really are
        if began and self._queue > self.workers * capacity.per_s * capacity.slack_s:
            self.late += arrived


class PeakKeeper(Learner):
    """The decision of one pool. All counts fade within a day."""

    KEPT = {
        **dict.fromkeys(("_arrived", "_ended", "_late", "_hour_s"), float),
        "keeping": bool,
        "_peaks": Annotated[list[float], msgspec.Meta(min_length=1)],
        "_recent": list[float],
        "_rehearsal": None,
    }

    def __init__(self, targets: Targets, *, season_s: float) -> None:
        """`season_s`: the day in which counts fade."""
        self.keeping = False
        self._targets = targets
        self._season_s = season_s
        self._recent: deque[float] = deque(maxlen=LOAD_STEPS)
        self._peaks: deque[float] = deque([0.0], maxlen=PEAK_HOURS)  # of the hours, the present one last
        self._hour_s = 0.0  # of the present one that are over
        self._rehearsal = Rehearsal()
        self._arrived = 0.0
        self._ended = self._late = 0.0

    @property
    def rate(self) -> float:
        """The load to keep workers for, requests a second: 0 while none is kept."""
        return MARGIN * max(self._peaks) if self.keeping else 0.0

    def note_ended(self, ended: Iterable[OutcomeSight]) -> None:
        for one in ended:
            self._ended += 1.0
            self._late += one.ttft_s > self._targets.ttft_s or one.itl_s > self._targets.itl_s

    def note(self, rate: float | None, capacity: Capacity | None, *, step_s: float, start_s: float, most: int) -> None:
        """Take the arrivals of a step. What is not known changes nothing."""
        if rate is None:
            return
        self._recent.append(rate)
        load = sum(self._recent) / len(self._recent)
        self._peaks[-1] = max(self._peaks[-1], load)
        self._hour_s += step_s
        if self._hour_s >= HOUR_S:
            self._peaks.append(load)
            self._hour_s = 0.0
        left = exp(-step_s / self._season_s)
        self._arrived, self._ended, self._late = self._arrived * left, self._ended * left, self._late * left
        self._rehearsal.late *= left
        if capacity is not None:
            self._arrived += rate * step_s
            need = max(1, workers_for(load, capacity, self._targets, most=most))
            self._rehearsal.step(rate * step_s, need, capacity, seconds=step_s, start_s=start_s)
        self._decide()

    def _decide(self) -> None:
        miss = self._targets.miss
        late = self._late / max(self._ended, LEAST_REQUESTS) / miss
        rehearsed = self._rehearsal.late / max(self._arrived, LEAST_REQUESTS) / (REHEARSED_LIMIT * miss)
        worst = max(late / LATE_LIMIT, min(late, rehearsed))
        self.keeping = worst > (END if self.keeping else 1.0)


HARDLY_ANY = 1.0  # request that is expected within the horizon: with less a pool without workers stays so


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a pool: `rate` a second lately, `forecast`, `waiting` requests, their late waits, and batch work."""

    rate: float
    forecast: Forecast | None
    waiting: int
    wait_s: float | None  # 95 % quantile of the waits lately
    backlog: tuple[tuple[float, int], ...] = ()
    idle: bool = False  # nothing has arrived for long
    start_s: float = 60.0
    kept: float = 0.0  # load that workers are kept for whatever is forecast, 0 = none


class Need(msgspec.Struct, frozen=True):
    workers: int
    reason: Reason


def need_of(demand: Demand, capacity: Capacity, targets: Targets, *, supply: int, ready: int, most: int) -> Need:
    """Return the need by known speeds. `supply`: workers that serve or are on their way, `ready`: those that serve."""
    expected = demand.forecast.value if demand.forecast is not None else demand.rate
    high = max(demand.forecast.high if demand.forecast is not None else 0.0, demand.rate)
    if demand.kept:
        high = min(high, max(demand.kept, demand.rate))
    if demand.idle and not demand.waiting and expected * demand.start_s < HARDLY_ANY:
        needs = [Need(0, "idle")]
    else:
        needs = [Need(max(1, workers_for(high, capacity, targets, most=most + 1)), "forecast")]
        needs.append(Need(workers_for(demand.kept, capacity, targets, most=most + 1), "peak_kept"))
    needs.append(
        Need(batch_workers(demand.backlog, per_s=capacity.per_s, start_s=demand.start_s, awake=supply > 0), "batch_deadline")
    )
    if demand.waiting and not supply:
        needs.insert(0, Need(1, "from_zero"))
    if demand.waiting > max(1, ready) * capacity.per_s * capacity.slack_s:  # some of them will have waited too long
        clear_s = max(demand.start_s, targets.ttft_s)
        needs.append(Need(ceil((demand.rate + demand.waiting / clear_s) / (FULL * capacity.per_s)), "backlog"))
    late = demand.wait_s is not None and demand.wait_s > capacity.slack_s
    if late and supply == ready and needs[0].workers <= supply:
        needs.append(Need(supply + 1, "waits_late"))
    best = max(needs, key=lambda need: need.workers)
    return Need(min(best.workers, most + 1), best.reason)


def need_by_slots(demand: Demand, *, held: int, slots: int, supply: int, ready: int) -> Need:
    """Return the need while no speed is known: one more when the workers are full, none less."""
    if demand.waiting and not supply:
        return Need(1, "from_zero")
    if demand.idle and not held and not demand.waiting and not demand.backlog:
        return Need(0, "idle")
    if supply == ready and ready and demand.waiting and (not slots or held >= FULL * slots):
        return Need(supply + 1, "slots_full")
    return Need(max(1, supply), "steady")


# Keeps the number of workers of one role from going up and down: up at once, down only when that has long been enough.
#
# A worker that was started is kept for two start-ups at least, so up, down and up again within that time cannot happen.

START_UPS = 2.0  # for which a number stays after it went up
LEAST_WINDOW_S = 30.0
HYSTERESIS_KEPT = 4000


class Hysteresis(Learner):
    """The history of one role. Times are Unix seconds."""

    KEPT = {"_needs": list[tuple[float, int]], "up_s": float | None, "down_s": float | None}

    def __init__(self, *, window_s: float) -> None:
        """`window_s`: for so long fewer must have been enough."""
        self._window_s = window_s
        self._needs: deque[tuple[float, int]] = deque(maxlen=HYSTERESIS_KEPT)
        self.up_s: float | None = None
        self.down_s: float | None = None

    def note(self, need: int, *, at: float) -> int:
        """Record the present need and return the highest recent one."""
        window_s = max(self._window_s, LEAST_WINDOW_S)
        self._needs.append((at, need))
        while self._needs and self._needs[0][0] < at - window_s:
            self._needs.popleft()
        return max(one[1] for one in self._needs)

    def may_go_down(self, *, at: float, start_s: float) -> bool:
        """Return whether the last way up is old enough."""
        return self.up_s is None or at - self.up_s >= START_UPS * start_s

    def went(self, change: int, *, at: float) -> None:
        if change > 0:
            self.up_s = at
        elif change < 0:
            self.down_s = at
