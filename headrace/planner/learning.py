"""Learns a pool and keeps that over a restart: speeds, start-ups, demand, requests, late ones, and the planner's own steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, exp, isnan, nan
from statistics import median
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from headrace.planner.capacity import FULL, Capacity, Shape, Speed, Targets, workers_for
from headrace.planner.observe import ROLES, Observation, OutcomeSight, StepSight, WorkerSight


class Learner:
    """Stores the attributes that `KEPT` names, each with its type as it is stored; None for those that are learners."""

    KEPT: ClassVar[Mapping[str, Any]] = {}

    def dump(self) -> dict[str, Any]:
        return {name: _stored(getattr(self, name)) for name in self.KEPT}

    def load(self, stored: Mapping[str, Any]) -> None:
        """Take stored attributes over. Raises ValueError, KeyError or msgspec's error for what is none."""
        for name, kind in self.KEPT.items():
            setattr(self, name, _recalled(getattr(self, name), stored[name], kind))


def _stored(value: Any) -> Any:
    match value:
        case Learner():
            return value.dump()
        case dict():
            return {name: _stored(one) for name, one in value.items()}
        case set():
            return sorted(value)
        case deque():
            return list(value)
        case np.ndarray():
            return value.tolist()
    return value


def _recalled(present: Any, stored: Any, kind: Any) -> Any:
    match present:
        case Learner():
            present.load(stored)
            return present
        case dict():
            return {name: _recalled(one, stored[name], kind) for name, one in present.items()}
    value = msgspec.convert(stored, kind)
    match present:
        case deque():
            return deque(value, maxlen=present.maxlen)
        case np.ndarray():
            array = np.array(value, dtype=float)
            if array.shape != present.shape or not np.isfinite(array).all():
                raise ValueError(f"{array.shape} is not the shape {present.shape}, or not all of it is finite")
            return array
    return value


# Learns what an engine step costs, from load reports: prefill by tokens, decode by sequences and by their context.
#
#     step_s ≈ base_s + prefill tokens × prefill_s + sequences × decode_s + context tokens × context_s
#
# Least squares over samples that fade, each divided by its own step time so that short steps count as much as long ones, with
# a pull towards a seed that is gone after a few dozen samples. None is below zero.

FADING = 0.995  # of the weight of earlier samples with each new one
SEED_WEIGHT = 4.0  # samples
LEAST_SAMPLES = 20  # before the curve is believed without a seed
SWEEPS = 50


class SpeedCurve(Learner):
    """The curve of one (model, pool, role)."""

    KEPT = {"_gram": list[list[float]], "_right": list[float], "samples": Annotated[int, msgspec.Meta(ge=0)]}

    def __init__(self, seed: Speed | None = None, *, fading: float = FADING) -> None:
        """`seed`: the speed that a profile has measured; without one the curve is not `known` before it has seen enough.

        `fading`: what is left of the weight of earlier samples with each new one; 1 weighs all alike.
        """
        self._fading = fading
        self._seed = np.array(msgspec.structs.astuple(seed or Speed()))
        self._seeded = seed is not None
        self._gram = np.zeros((4, 4))
        self._right = np.zeros(4)
        self.samples = 0

    @property
    def known(self) -> bool:
        """True once capacities can be derived from it."""
        return self._seeded or self.samples >= LEAST_SAMPLES

    def learn(self, step: StepSight) -> None:
        row = np.array([1.0, step.prefill_tokens, step.decodes, step.context_tokens]) / step.step_s
        self._gram = self._fading * self._gram + np.outer(row, row)
        self._right = self._fading * self._right + row
        self.samples += 1

    def speed(self) -> Speed:
        """Return the present estimate: all coefficients finite, none negative, the first three above zero."""
        gram = self._gram * np.outer(self._seed, self._seed)  # unknowns are factors of the seed's values
        pull = (SEED_WEIGHT * max(0.0, 1.0 - self.samples / 50.0) + 0.02) * np.maximum(1.0, 0.01 * np.diag(gram))
        gram = gram + np.diag(pull)
        right = self._right * self._seed + pull
        found = np.ones(4)
        for _ in range(SWEEPS):  # projected Gauss-Seidel
            for i in range(4):
                rest = right[i] - gram[i] @ found + gram[i, i] * found[i]
                found[i] = max(0.0 if i == 3 else 1e-4, rest / gram[i, i])
        return Speed(**dict(zip(Speed.__struct_fields__, (found * self._seed).tolist(), strict=True)))


# Fits a profile to engine steps. Unlike the curves of a running planner, which forget, a profile weighs all steps alike.

NEAR = 0.2  # an error within this part of a step's time is near
SPREAD = 4.0  # largest over smallest number of sequences from which their cost can be told from that of the step itself


class RoleProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a role. `error`: the median error of a step, in parts of its time. `near`: the share of steps within `NEAR`.

    `lacks`: what the steps did not vary in, so that a coefficient is a guess.
    """

    speed: Speed
    steps: int
    error: float
    near: float
    lacks: tuple[str, ...] = ()


class SpeedProfile:
    """The steps of one pool by role, each once."""

    def __init__(self) -> None:
        self._steps: dict[str, list[StepSight]] = {}
        self._last: dict[str, StepSight] = {}

    def note(self, role: str, worker: str, step: StepSight) -> None:
        """Take the step of a report of `worker`.

        Reports repeat the last step until there is another one, so the first of a worker may be of any age and is left out.
        """
        before, self._last[worker] = self._last.get(worker), step
        if role in ROLES and before not in (None, step):
            self._steps.setdefault(role, []).append(step)

    def counts(self) -> dict[str, int]:
        return {role: len(self._steps[role]) for role in ROLES if role in self._steps}

    def roles(self) -> dict[str, RoleProfile]:
        """Return the profile of each role that has shown enough steps."""
        return {role: _fitted(role, steps) for role, steps in self._steps.items() if len(steps) >= LEAST_SAMPLES}


def _fitted(role: str, steps: list[StepSight]) -> RoleProfile:
    curve = SpeedCurve(fading=1.0)
    for one in steps:
        curve.learn(one)
    speed = curve.speed()
    errors = [abs(speed.took_s(one.prefill_tokens, one.decodes, one.context_tokens) / one.step_s - 1) for one in steps]
    lacks = []
    prompts = sum(one.prefill_tokens > 0 for one in steps)
    decodes = [one.decodes for one in steps if one.decodes]
    if role != "decode" and prompts < LEAST_SAMPLES:
        lacks.append(f"only {prompts} steps computed a prompt")
    if role != "prefill" and (not decodes or max(decodes) < SPREAD * min(decodes)):
        lacks.append(f"steps that decode had {f'{min(decodes)} to {max(decodes)} sequences' if decodes else 'no sequence'}")
    near = sum(error <= NEAR for error in errors) / len(errors)
    return RoleProfile(speed=speed, steps=len(steps), error=median(errors), near=near, lacks=tuple(lacks))


START_UPS_KEPT = 20
LOST_AFTER = 3.0  # start-up times: a start that shows nothing for so long has failed, and is supply no more
LEAST_LOST_S = 30.0


class StartUps(Learner):
    """Start-ups of the workers of a pool. Times are Unix seconds."""

    KEPT = {"_took": list[float], "_asked": list[tuple[float, str]], "_known": set[str] | None}

    def __init__(self, *, first_s: float) -> None:
        """`first_s`: assumed while no start-up was seen."""
        self._first_s = first_s
        self._took: deque[float] = deque(maxlen=START_UPS_KEPT)
        self._asked: list[tuple[float, str]] = []  # when, and for which role
        self._known: set[str] | None = None  # workers that are there; None before the first look
        self.lost = 0  # starts that never became a worker

    @property
    def p90_s(self) -> float:
        """The 90 % quantile of what starting took."""
        return sorted(self._took)[ceil(0.9 * len(self._took)) - 1] if self._took else self._first_s

    def asked(self, role: str, *, at: float) -> None:
        self._asked.append((at, role))

    def under_way(self, role: str) -> int:
        return sum(one[1] == role for one in self._asked)

    def see(self, workers: Iterable[WorkerSight], *, at: float) -> None:
        """Match workers to starts, and give up starts without one. Workers count, not requests for them."""
        there = {one.worker: one for one in workers}
        known, self._known = self._known, set(there)
        for name, worker in there.items():
            if known is not None and name in known:
                continue
            asked = next((one for one in self._asked if one[1] == worker.role), None)
            if asked is not None:
                self._asked.remove(asked)
                if at > asked[0]:
                    self._took.append(at - asked[0])
            elif worker.start_s > 0:
                self._took.append(worker.start_s)
        patience_s = max(LEAST_LOST_S, LOST_AFTER * self.p90_s)
        kept = [one for one in self._asked if at - one[0] <= patience_s]
        self.lost += len(self._asked) - len(kept)
        self._asked = kept


LEAST_WATCHED = 0.5  # of a step: less is no measurement


class DemandSeries(Learner):
    """Arrivals per second, step by step, the oldest first. Times are Unix seconds."""

    def __init__(self, *, step_s: float, keep_s: float) -> None:
        self.step_s = step_s
        self.values: deque[float | None] = deque(maxlen=max(2, int(keep_s / step_s)))
        self.open_s: float | None = None  # when the open step began; None before the first arrival
        self._count = self._watched_s = 0.0

    def add(self, count: int | None, *, since_s: float, until_s: float) -> list[float | None]:
        """Note `count` arrivals in a time, None if that is not known, and return the steps that have closed.

        A clock that went back adds nothing: what is recorded stays.
        """
        if until_s <= since_s:
            return []
        if self.open_s is None:
            self.open_s = since_s - since_s % self.step_s
        if until_s - self.open_s > self.step_s * (self.values.maxlen or 1):  # away for longer than is kept
            self.values.clear()
            self.open_s, self._count, self._watched_s = until_s - until_s % self.step_s, 0.0, 0.0
        rate = None if count is None else count / (until_s - since_s)
        closed: list[float | None] = []
        at = max(since_s, self.open_s)
        while until_s >= (end := self.open_s + self.step_s):
            self._note(rate, end - at)
            closed.append(self._count / self._watched_s if self._watched_s >= LEAST_WATCHED * self.step_s else None)
            self._count = self._watched_s = 0.0
            self.open_s, at = end, max(at, end)
        self._note(rate, until_s - at)
        self.values.extend(closed)
        return closed

    def _note(self, rate: float | None, seconds: float) -> None:
        if rate is not None and seconds > 0:
            self._count += rate * seconds
            self._watched_s += seconds

    def rate(self, steps: int) -> float | None:
        """Return the mean of the last steps, None while none of them is known."""
        known = [value for value in list(self.values)[-steps:] if value is not None]
        return sum(known) / len(known) if known else None

    def dump(self) -> dict[str, Any]:
        """Return the closed steps as they are stored. The open one is watched anew after a restart."""
        values = np.array([nan if value is None else value for value in self.values], dtype="<f4")
        return {"step_s": self.step_s, "open_s": self.open_s, "values": values.tobytes()}

    def load(self, stored: Mapping[str, Any]) -> None:
        """Take a stored series over, unless its steps are others: then it says nothing here."""
        if stored["step_s"] != self.step_s or stored["open_s"] is None:
            return
        values = np.frombuffer(stored["values"], dtype="<f4").tolist()
        self.values.extend(None if isnan(value) else value for value in values)
        self.open_s = float(stored["open_s"])


REQUESTS_KEPT = 500
FIRST_OUTPUT = 256.0  # tokens, while no answer has ended
LONG = 0.95


class RecentRequests(Learner):
    """The last requests of a pool, whatever they were: `shape` is None before the first."""

    KEPT = {"_lengths": list[tuple[int, int]], "_outputs": list[int]}

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=REQUESTS_KEPT)
        self._outputs: deque[int] = deque(maxlen=REQUESTS_KEPT)
        self._waits: deque[tuple[float, float]] = deque(maxlen=REQUESTS_KEPT)

    def note(self, seen: Observation) -> None:
        """Record placements and ended requests."""
        for one in seen.placed:
            self._lengths.append((one.prompt, min(one.uncached, one.prompt)))
            self._waits.append((seen.at, one.waited_s))
        self._outputs.extend(seen.outputs)

    @property
    def shape(self) -> Shape | None:
        """The shape of requests, None while none was seen."""
        return shape_of(self._lengths, self._outputs) if self._lengths else None

    def wait_s(self, share: float, *, since_s: float) -> float | None:
        """Return the quantile of the waits of requests placed since a time, None if there were too few to tell."""
        waits = sorted(wait for at, wait in self._waits if at >= since_s)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if len(waits) >= 10 else None


def shape_of(lengths: Iterable[tuple[int, int]], outputs: Iterable[int]) -> Shape:
    """Return the shape of requests by their tokens of prompt, those of them to compute, and of answers."""
    prompts, uncached = zip(*lengths, strict=True)
    counts = list(outputs)
    return Shape(
        prompt=sum(prompts) / len(prompts),
        uncached=sum(uncached) / len(uncached),
        output=sum(counts) / len(counts) if counts else FIRST_OUTPUT,
        long=float(sorted(uncached)[ceil(LONG * len(uncached)) - 1]),
    )


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
        self.value = self._exact = first
        self._targets = targets
        self._moves = moves

    def note(self, ended: Sequence[OutcomeSight]) -> None:
        """Learn from the requests that have ended since the last look."""
        if not self._moves:
            return
        miss = self._targets.miss
        change = min(MOST_UP, GAIN / miss * (self._targets.missed(ended) - AIM * miss * len(ended)))
        self._exact = min(max(HIGHEST, self.value), max(min(LOWEST, self.value), self._exact + change))
        if abs(self._exact - self.value) >= SHOWN:
            self.value = self._exact

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
        if self._queue > self.workers * capacity.per_s * capacity.slack_s:
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
        self._arrived = self._ended = self._late = 0.0

    @property
    def rate(self) -> float:
        """The load to keep workers for, requests a second: 0 while none is kept."""
        return MARGIN * max(self._peaks) if self.keeping else 0.0

    def note_ended(self, ended: Sequence[OutcomeSight]) -> None:
        self._ended += len(ended)
        self._late += self._targets.missed(ended)

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
        miss = self._targets.miss
        late = self._late / max(self._ended, LEAST_REQUESTS) / miss
        rehearsed = self._rehearsal.late / max(self._arrived, LEAST_REQUESTS) / (REHEARSED_LIMIT * miss)
        self.keeping = max(late / LATE_LIMIT, min(late, rehearsed)) > (END if self.keeping else 1.0)


# Keeps the number of workers of one role from going up and down: up at once, down only when that has long been enough.
#
# A worker that was started is kept for two start-ups at least, so up, down and up again within that time cannot happen.

START_UPS = 2.0  # for which a number stays after it went up
LEAST_WINDOW_S = 30.0
NEEDS_KEPT = 4000


class Hysteresis(Learner):
    """The history of one role. Times are Unix seconds."""

    KEPT = {"_needs": list[tuple[float, int]], "up_s": float | None}

    def __init__(self, *, window_s: float) -> None:
        """`window_s`: for so long fewer must have been enough."""
        self._window_s = max(window_s, LEAST_WINDOW_S)
        self._needs: deque[tuple[float, int]] = deque(maxlen=NEEDS_KEPT)
        self.up_s: float | None = None

    def note(self, need: int, *, at: float) -> int:
        """Record the present need and return the highest recent one."""
        self._needs.append((at, need))
        while self._needs[0][0] < at - self._window_s:
            self._needs.popleft()
        return max(one[1] for one in self._needs)

    def may_go_down(self, *, at: float, start_s: float) -> bool:
        """Return whether the last way up is old enough."""
        return self.up_s is None or at - self.up_s >= START_UPS * start_s
