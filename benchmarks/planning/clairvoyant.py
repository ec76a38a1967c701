"""Plans with the true arrivals of the future, as the measure of what knowing would be worth."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.planning.traffic import rates
from headrace.planner.capacity import Speed, Targets, capacity_of, workers_for
from headrace.planner.learning import shape_of
from headrace.planner.observe import Observation
from headrace.planner.plan import Action, victims
from headrace.planner.replay import Request


class Clairvoyant:
    """The least workers for what really arrives until a worker that is started now could serve.

    `kept_s`: a worker that was started stays at least so long after the last start. 0: it leaves when it is not needed.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        speed: Speed,
        targets: Targets,
        start_s: float,
        tick_s: float = 5.0,
        step_s: float = 15.0,
        slots: int = 64,
        most: int = 20,
        kept_s: float = 0.0,
    ) -> None:
        shape = shape_of(((one.prompt, one.uncached) for one in requests), (one.output for one in requests))
        capacity = capacity_of("aggregated", speed, shape, targets, slots=slots)
        self._needs = [max(1, workers_for(rate, capacity, targets, most=most)) for rate in rates(requests, step_s)]
        self._step_s, self._ahead_s = step_s, start_s + tick_s
        self._kept_s = kept_s
        self._began_s: float | None = None
        self._up_s = float("-inf")
        self._there = 1

    def decide(self, seen: Observation) -> list[Action]:
        """Return what is to be done."""
        if self._began_s is None:
            self._began_s = seen.at
        at_s = seen.at - self._began_s
        first, last = int(at_s / self._step_s), int((at_s + self._ahead_s) / self._step_s)
        wanted = max(self._needs[first : last + 1], default=1)
        if wanted < self._there and at_s - self._up_s < self._kept_s:
            return []
        workers = seen.of_role("aggregated")
        change = wanted - self._there
        if change < 0:
            leaving = victims(workers, min(-change, len(workers) - 1))
            self._there -= len(leaving)
            return [Action(kind="drain", role="aggregated", worker=one.worker) for one in leaving]
        if change > 0:
            self._there, self._up_s = wanted, at_s
        return [Action(kind="start", role="aggregated")] * change
