"""Decides when a planner keeps the workers that the highest load of the last day needs, because bursts come sooner than starts.

Two signs tell it, each as a share of the requests of the last day:

- those that really missed a target;
- those that would be late in a *rehearsal*: the same arrivals with workers that are started only when the load is there, each a
  start-up later. Forecasts see some bursts, and so a multiple of what may be late is allowed here. Slow starts show in it after
  the first bursts, while it is still luck whether a forecast saw them.

Keeping begins where many were really late, or where some were and the rehearsal says that more will be. The rehearsal alone
does not do: it calls waves bursts, which forecasts do see. Keeping ends below a tenth of that. A minute more of a start-up
makes bursts late that were none before: this is why attainment falls off a cliff, and why the static number is the cheaper one
beyond it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, exp
from typing import Any

from headrace.planner.capacity import FULL, Capacity, Targets, workers_for
from headrace.planner.observation import OutcomeSight

LATE_LIMIT = 3.0  # times the share that may miss: really late
REHEARSED_LIMIT = 12.0  # times that share: late without any forecast, where more than that share was really late
END = 0.1  # of the limits, below which keeping ends: the requests of a quiet hour say nothing of the next burst
LEAST_REQUESTS = 1000.0  # fewer say nothing of a share of one in a hundred
LOAD_STEPS = 4  # whose mean is the load: one step alone is noise
MARGIN = 1.1  # of the highest load: the next burst may be higher
PEAK_HOURS = 24
HOUR_S = 3600.0
HELD_START_UPS = 2.0


class Rehearsal:
    """A pool without forecasts, as a flow: its workers follow the load a start-up late. Times are seconds of its own."""

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

    def dump(self) -> dict[str, object]:
        """Return what is stored."""
        flow = [self.workers, self._queue, self._up_s, self._now_s]
        return {"late": self.late, "flow": flow, "starting": list(self._starting)}

    def load(self, late: float, flow: Sequence[float], starting: Iterable[float]) -> None:
        """Take a stored one over. Raises ValueError for what is none."""
        workers, self._queue, self._up_s, self._now_s = (float(one) for one in flow)
        self.late, self.workers = float(late), max(1, int(workers))
        self._starting = deque(float(one) for one in starting)


class PeakKeeper:
    """The decision of one pool. All counts fade within a day."""

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
        """Count requests that have ended."""
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

    def dump(self) -> dict[str, object]:
        """Return what is stored."""
        return {
            "keeping": self.keeping,
            "peaks": list(self._peaks),
            "recent": list(self._recent),
            "counts": [self._arrived, self._ended, self._late, self._hour_s],
            "rehearsal": self._rehearsal.dump(),
        }

    def load(
        self,
        *,
        keeping: bool,
        peaks: Sequence[float],
        recent: Iterable[float],
        counts: Sequence[float],
        rehearsal: Mapping[str, Any],
    ) -> None:
        """Take stored ones over. Raises ValueError for what is none."""
        if not peaks:
            raise ValueError("no peak is stored")
        self._arrived, self._ended, self._late, self._hour_s = (float(one) for one in counts)
        self._rehearsal.load(**rehearsal)
        self._recent.extend(float(one) for one in recent)
        self._peaks.clear()
        self._peaks.extend(float(one) for one in peaks)
        self.keeping = bool(keeping)
