"""Capacity of workers: learns what an engine step and a start cost, and derives requests per second within the targets.

A worker that decodes `k` sequences at once computes prompts in the same steps. With `s` seconds for a step of `k` sequences,
`o` tokens of output and `p` seconds for a prompt, Little's law gives the rate `k / (o·s + k·p)` at full load; the largest `k`
whose time between tokens meets the target is used. Workers that only prefill can take `1 / p`.

Requests wait in one queue for all workers, so the wait is that of M/M/N (Erlang's C), with `1 / rate` as the time of service.
Where the computation of the prompt alone takes longer than the target, no number of workers meets it: the count is then what
the load needs, and the plan says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, exp, isfinite
from statistics import median
from typing import Annotated, Any

import msgspec
import numpy as np

from headrace.planner.memory import Learner
from headrace.planner.observe import ROLES, StepSight, WorkerSight

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


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an engine step, of a prefill token, of a decoding sequence, and of a token of context in one of them."""

    base_s: float = 0.01
    prefill_s: float = 1e-4
    decode_s: float = 2e-4
    context_s: float = 1e-8

    def step_s(self, sequences: float, context: float) -> float:
        """Return the time of a step that only decodes. `context`: tokens of each sequence."""
        return self.base_s + sequences * (self.decode_s + context * self.context_s)


def _vector(speed: Speed) -> Any:
    return np.array([speed.base_s, speed.prefill_s, speed.decode_s, speed.context_s], dtype=float)


class SpeedCurve(Learner):
    """The curve of one (model, pool, role)."""

    KEPT = {"_gram": list[list[float]], "_right": list[float], "samples": Annotated[int, msgspec.Meta(ge=0)]}

    def __init__(self, seed: Speed | None = None, *, fading: float = FADING) -> None:
        """`seed`: what a profile has measured; without one the curve is not `known` before it has seen enough.

        `fading`: what is left of the weight of earlier samples with each new one; 1 weighs all alike.
        """
        self._fading = fading
        self._seed = _vector(seed or Speed())
        self._seeded = seed is not None
        self._gram = np.zeros((4, 4))
        self._right = np.zeros(4)
        self.samples = 0

    @property
    def known(self) -> bool:
        """True once capacities can be derived from it."""
        return self._seeded or self.samples >= LEAST_SAMPLES

    def learn(self, step_s: float, *, prefill_tokens: float, decodes: float, context_tokens: float) -> bool:
        """Learn from a step. Returns False for one that says nothing: no work, or no finite time."""
        row = np.array([1.0, prefill_tokens, decodes, context_tokens], dtype=float)
        if not isfinite(step_s) or step_s <= 0 or not np.isfinite(row).all() or (row < 0).any():
            return False
        if prefill_tokens + decodes <= 0:
            return False
        row /= step_s
        self._gram = self._fading * self._gram + np.outer(row, row)
        self._right = self._fading * self._right + row
        self.samples += 1
        return True

    def speed(self) -> Speed:
        """Return the present estimate: all coefficients finite, none negative, the first three above zero."""
        weight = SEED_WEIGHT * max(0.0, 1.0 - self.samples / 50.0) + 0.02
        # unknowns are factors of the seed's values
        gram = self._gram * np.outer(self._seed, self._seed)
        right = self._right * self._seed
        gram = gram + weight * np.diag(np.maximum(1.0, 0.01 * np.diag(gram)))
        right = right + weight * np.maximum(1.0, 0.01 * np.diag(self._gram * np.outer(self._seed, self._seed)))
        found = np.ones(4)
        for _ in range(SWEEPS):  # projected Gauss-Seidel
            for i in range(4):
                rest = right[i] - gram[i] @ found + gram[i, i] * found[i]
                found[i] = max(0.0 if i == 3 else 1e-4, rest / gram[i, i])
        base_s, prefill_s, decode_s, context_s = (float(value) for value in found * self._seed)
        return Speed(base_s=base_s, prefill_s=prefill_s, decode_s=decode_s, context_s=context_s)


FULL = 0.95  # of its capacity that a worker is planned to be used, whatever the targets are
LEAST_SLACK = 0.25  # of the target that is left for waiting where the prompt takes all of it
MOST_SEQUENCES = 4096


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Times to be met: to the first token, between tokens, and the share of requests that may miss them."""

    ttft_s: float = 2.0
    itl_s: float = 0.05
    miss: float = 0.01


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Requests as they come: mean tokens of prompt, of those to compute, and of output; `long`: a long one's to compute."""

    prompt: float
    uncached: float
    output: float
    long: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The load that one worker can take. `reachable` False: the target is missed however many workers there are."""

    per_s: float  # requests
    sequences: int = 1  # at once
    slack_s: float = 0.0  # that a request may wait
    reachable: bool = True


def prefill_capacity(speed: Speed, shape: Shape, targets: Targets) -> Capacity:
    """Return the capacity of a worker that only computes prompts."""
    own_s = speed.base_s + shape.uncached * speed.prefill_s
    return _within(targets, per_s=1.0 / own_s, sequences=1, long_s=speed.base_s + shape.long * speed.prefill_s)


def decode_capacity(speed: Speed, shape: Shape, targets: Targets, *, slots: int, kv_tokens: int) -> Capacity:
    """Return the capacity of a worker that decodes what others have prefilled."""
    return _serving(speed, shape, targets, slots=slots, kv_tokens=kv_tokens, prompt_s=0.0, long_s=speed.base_s)


def aggregated_capacity(speed: Speed, shape: Shape, targets: Targets, *, slots: int, kv_tokens: int) -> Capacity:
    """Return the capacity of a worker that does both."""
    prompt_s, long_s = shape.uncached * speed.prefill_s, speed.base_s + shape.long * speed.prefill_s
    return _serving(speed, shape, targets, slots=slots, kv_tokens=kv_tokens, prompt_s=prompt_s, long_s=long_s)


def _serving(
    speed: Speed, shape: Shape, targets: Targets, *, slots: int, kv_tokens: int, prompt_s: float, long_s: float
) -> Capacity:
    context = shape.prompt + shape.output / 2
    output = max(1.0, shape.output)
    most = max(1, min(slots or MOST_SEQUENCES, int(kv_tokens / max(1.0, context)) if kv_tokens else MOST_SEQUENCES))

    def rate_of(sequences: int) -> float:
        return sequences / (output * speed.step_s(sequences, context) + sequences * prompt_s)

    def meets(sequences: int) -> bool:
        share = 1.0 - min(0.99, rate_of(sequences) * prompt_s)
        return speed.step_s(sequences, context) / share <= targets.itl_s

    low, high = 1, most  # more sequences never make steps shorter
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if meets(middle) else (low, middle - 1)
    found = _within(targets, per_s=rate_of(low), sequences=low, long_s=long_s)
    if not meets(1):
        return Capacity(per_s=rate_of(most), sequences=most, slack_s=found.slack_s, reachable=False)
    return found


def _within(targets: Targets, *, per_s: float, sequences: int, long_s: float) -> Capacity:
    slack_s = targets.ttft_s - long_s
    least_s = LEAST_SLACK * targets.ttft_s
    return Capacity(per_s=per_s, sequences=sequences, slack_s=max(slack_s, least_s), reachable=slack_s > 0)


def late_share(workers: int, rate: float, capacity: Capacity) -> float:
    """Return the share of requests that wait longer than they may, 1 for workers that cannot keep up."""
    offered = rate / capacity.per_s
    if workers <= offered:
        return 1.0 if rate > 0 else 0.0
    blocked = 1.0  # Erlang's B, by its recursion
    for n in range(1, workers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    waits = blocked / (1.0 - offered / workers * (1.0 - blocked))
    return min(1.0, waits * exp(-(workers - offered) * capacity.per_s * capacity.slack_s))


def workers_for(rate: float, capacity: Capacity, targets: Targets, *, most: int) -> int:
    """Return the least number of workers that take this rate within the targets: 0 for none, at most `most`."""
    if not rate > 0:
        return 0
    least = max(1, ceil(rate / (FULL * capacity.per_s)))
    for workers in range(min(least, most), most):
        if late_share(workers, rate, capacity) <= targets.miss:
            return workers
    return most


KEPT = 20
LOST_AFTER = 3.0  # start-up times: a start that shows nothing for so long has failed, and is supply no more
LEAST_LOST_S = 30.0


class StartUps(Learner):
    """Start-ups of the workers of a pool. Times are Unix seconds."""

    KEPT = {"_took": list[float], "_asked": list[tuple[float, str]], "_known": set[str] | None}

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
        self._asked += [(at, role)] * count

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


# Fits a profile to engine steps: the seconds of a step by role, from load reports, and how well they fit.
#
# Unlike the curves of a running planner, which forget, a profile weighs all steps alike.

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

    def note(self, role: str, worker: str, step: StepSight) -> bool:
        """Take the step that a report of `worker` tells of. Returns False for one that is left out.

        Reports tell of the last step until there is another one, so the first of a worker may be of any age.
        """
        if role not in ROLES or step.step_s <= 0 or step.prefill_tokens + step.decodes <= 0:
            return False
        before, self._last[worker] = self._last.get(worker), step
        if before in (None, step):
            return False
        self._steps.setdefault(role, []).append(step)
        return True

    def count(self, role: str) -> int:
        return len(self._steps.get(role, ()))

    def roles(self) -> dict[str, RoleProfile]:
        """Return the profile of each role that has shown enough steps."""
        return {role: _fitted(role, steps) for role, steps in self._steps.items() if len(steps) >= LEAST_SAMPLES}


def _fitted(role: str, steps: list[StepSight]) -> RoleProfile:
    curve = SpeedCurve(fading=1.0)
    for one in steps:
        curve.learn(one.step_s, prefill_tokens=one.prefill_tokens, decodes=one.decodes, context_tokens=one.context_tokens)
    speed = curve.speed()
    errors = [abs(_step_s(speed, one) / one.step_s - 1) for one in steps]
    return RoleProfile(
        speed=speed,
        steps=len(steps),
        error=median(errors),
        near=sum(error <= NEAR for error in errors) / len(errors),
        lacks=tuple(_lacks(role, steps)),
    )


def _step_s(speed: Speed, step: StepSight) -> float:
    return (
        speed.base_s
        + step.prefill_tokens * speed.prefill_s
        + step.decodes * speed.decode_s
        + step.context_tokens * speed.context_s
    )


def _lacks(role: str, steps: list[StepSight]) -> list[str]:
    found = []
    prompts = [one.prefill_tokens for one in steps if one.prefill_tokens]
    decodes = [one.decodes for one in steps if one.decodes]
    if role != "decode" and len(prompts) < LEAST_SAMPLES:
        found.append(f"only {len(prompts)} steps computed a prompt")
    if role != "prefill" and (not decodes or max(decodes) < SPREAD * min(decodes)):
        seen = f"{min(decodes)} to {max(decodes)} sequences" if decodes else "no sequence"
        found.append(f"steps that decode had {seen}")
    return found
