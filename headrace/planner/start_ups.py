"""Knows how long workers take to start, and which starts that were asked for are still on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil

from headrace.planner.observation import WorkerSight

KEPT = 20
LOST_AFTER = 3.0  # start-up times: a start that shows nothing for so long has failed, and is supply no more
LEAST_LOST_S = 30.0


class StartUps:
    """Start-ups of the workers of a pool. Times are Unix seconds."""

    def __init__(self, *, first_s: float) -> None:
        """`first_s`: assumed while no start-up was seen."""
        self._first_s = first_s
        self._took: deque[float] = deque(maxlen=KEPT)
        self._asked: list[tuple[float, str]] = []  # when, and for which role
        self._known: set[str] | None = None  # workers that are there; None before the first look
        self.lost = 0  # starts that never became a worker

    @property
    def p90_s(self) -> float:
        """The 90 % quantile of what starting took."""
        if not self._took:
            return self._first_s
        return sorted(self._took)[ceil(0.9 * len(self._took)) - 1]

    def asked(self, role: str, *, at: float, count: int = 1) -> None:
        """Note starts that were asked for."""
        self._asked += [(at, role)] * count

    def under_way(self, role: str) -> int:
        """Return how many starts of a role are on their way."""
        return sum(one[1] == role for one in self._asked)

    def see(self, workers: Iterable[WorkerSight], *, at: float) -> None:
        """Look which workers have come, and give up starts that show nothing. What is there counts, not what was asked."""
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

    def dump(self) -> dict[str, object]:
        """Return what is stored."""
        return {
            "took": list(self._took),
            "asked": [list(one) for one in self._asked],
            "known": sorted(self._known) if self._known is not None else None,
        }

    def load(self, took: Iterable[float], asked: Iterable[Sequence[object]], known: Iterable[str] | None) -> None:
        """Take stored ones over."""
        self._took.extend(float(one) for one in took)
        self._asked = [(float(str(one[0])), str(one[1])) for one in asked]
        self._known = set(known) if known is not None else None
