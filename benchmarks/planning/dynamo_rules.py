"""Follows the rules that NVIDIA has published for the planner of Dynamo 1.6, for a comparison on the same engines.

Written from the description of its formulas and defaults, not from its code: every 180 s a *throughput* step, every 5 s a
*load* step above it. Where the published rules leave a choice, the kinder one is taken: its curves are the true speeds of the
engines, and the workers that leave are those with the least work. Its engines do both prefill and decode here, so a request
takes what both take.
"""

from __future__ import annotations

from math import ceil
from typing import Literal

from headrace.planner.capacity import Speed
from headrace.planner.forecast import Forecaster, LocalTrend, Mean
from headrace.planner.observe import Observation, WorkerSight
from headrace.planner.plan import Action, victims

THROUGHPUT_S = 180.0
LOAD_S = 5.0
SENSITIVITY = 0.8
MOST_STEP = 8  # replicas in one throughput step
Predictor = Literal["constant", "kalman"]


class PublishedRules:
    """The planner of one pool. `decide` is asked every tick of 5 s."""

    def __init__(
        self, *, speed: Speed, ttft_s: float, itl_s: float, most: int, slots: int = 64, predictor: Predictor = "kalman"
    ) -> None:
        self._speed, self._ttft_s, self._itl_s = speed, ttft_s, itl_s
        self._most, self._slots = most, slots
        self._predictor: Forecaster = LocalTrend(level_var=1.0, trend_var=0.1) if predictor == "kalman" else Mean(1, "last")
        self._last = Mean(1, "last")
        self._throughput_s: float | None = None  # when the last throughput step was
        self._load_s = float("-inf")
        self._started = 0
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._shape = (0.0, 0.0)  # mean tokens of input and output
        self._floor = 1
        self._expected: int | None = None  # workers that there should be: start-ups are waited for
        self._pending = 0

    def decide(self, seen: Observation) -> list[Action]:
        """Take what is seen and return what is to be done."""
        workers = seen.of_role("aggregated")
        count = len(workers)
        self._started += (seen.arrived or 0) + seen.refused
        self._inputs += [one.uncached for one in seen.placed]
        self._outputs += seen.outputs
        if self._expected is None:
            self._expected = count
        if self._throughput_s is None:
            self._throughput_s = seen.at
        wanted = self._expected
        if seen.at - self._throughput_s >= THROUGHPUT_S:
            self._floor = self._throughput(self._expected, seen.at - self._throughput_s)
            self._throughput_s = seen.at
            wanted = max(wanted, self._floor)
        elif seen.at - self._load_s >= LOAD_S and count == self._expected:  # else: scaling in progress
            self._load_s = seen.at
            wanted = max(self._floor, count + self._load_change(workers, seen.waiting or 0))
        wanted = max(1, min(wanted, self._most))
        change, self._expected = wanted - self._expected, wanted
        if change > 0:
            return [Action(kind="start", role="aggregated")] * change
        return [Action(kind="drain", role="aggregated", worker=one.worker) for one in victims(workers, -change)]

    def _throughput(self, now: int, took_s: float) -> int:
        """Return the replicas for the predicted rate: the floor of the load steps until the next one."""
        if self._inputs:
            output = sum(self._outputs) / len(self._outputs) if self._outputs else self._shape[1] or 256.0
            self._shape = (sum(self._inputs) / len(self._inputs), max(1.0, output))
        for model in (self._predictor, self._last):
            model.update(self._started / took_s)
        predicted = self._predictor.predict(1)
        rate = predicted if predicted is not None else self._last.predict(1) or 0.0
        self._started, self._inputs, self._outputs = 0, [], []
        if not self._shape[0]:
            return 1
        return max(1, min(ceil(rate / self._capacity()), now + MOST_STEP, self._most))

    def _capacity(self) -> float:
        """Return the requests a second of a replica within both targets."""
        isl, osl = self._shape
        context = isl + osl / 2.0
        prompts = max(
            (n / first_s for n in range(1, 65) if (first_s := self._first_s(n * isl)) <= self._ttft_s),
            default=1.0 / self._first_s(isl),
        )
        answers = max(
            (
                n / (osl * self._speed.step_s(n, context))
                for n in range(1, self._slots + 1)
                if self._speed.step_s(n, context) <= self._itl_s
            ),
            default=1.0 / (osl * self._speed.step_s(1, context)),
        )
        return 1.0 / (1.0 / prompts + 1.0 / answers)

    def _first_s(self, tokens: float) -> float:
        return self._speed.base_s + tokens * self._speed.prefill_s

    def _load_change(self, workers: list[WorkerSight], waiting: int) -> int:
        """Return +1 if every engine is estimated to miss a target, -1 if one less would still meet them all."""
        if not workers or not self._shape[0]:
            return 0
        isl, osl = self._shape
        context, count = isl + osl / 2.0, len(workers)
        own_s = self._first_s(isl)
        queues = [(one.queued_prefill_tokens + waiting * isl / count) * self._speed.prefill_s for one in workers]
        steps = [self._speed.step_s(one.running + waiting / count, context) for one in workers]
        if all(queue + own_s > self._ttft_s for queue in queues) or all(step > self._itl_s for step in steps):
            return 1
        if count < 2:
            return 0
        more = count / (count - 1)
        room_s = (self._ttft_s - own_s) * SENSITIVITY
        fewer = all(queue * more < room_s for queue in queues) and all(
            self._speed.step_s((one.running + waiting / count) * more, context) < self._itl_s * SENSITIVITY
            and (one.running + waiting / count) * more <= self._slots
            for one in workers
        )
        return -1 if fewer else 0
