"""Replays of a trace in time: one, all policies side by side, and the search for the load that a policy can bear."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.tools.replay_bench.ceiling import Ceiling, ceiling
from headrace.tools.replay_bench.classic import SWEEP, ClassicWeights
from headrace.tools.replay_bench.engine import EngineModel, ReplayFleet
from headrace.tools.replay_bench.measure import GOAL_TTFT_S, RunFacts, Summary, summarise
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.trace import Trace, accelerate
from headrace.tools.replay_bench.world import Delays, ReplayOutcome, World

KNEE_PRECISION = 0.01  # the knee is known when the bracket is so narrow, relatively
LOWEST_RATE, HIGHEST_RATE = 1 / 64, 64.0  # a knee is searched between these


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPool:
    """A trace, and the pool that it is replayed on."""

    trace: Trace
    workers: int
    model: EngineModel
    routers: int = 1
    seed: int = 0
    deadline_s: float = float("inf")
    delays: Delays = field(default_factory=Delays)

    def ceiling(self) -> Ceiling:
        return ceiling(self.trace, pooled_blocks=self.workers * self.model.blocks)


@dataclass(frozen=True, slots=True)
class Replay:
    """Figures of a replay, and the outcome of every request."""

    summary: Summary
    outcomes: list[ReplayOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The highest rate at which the policy kept TTFT p90 within the goal. `summary` is the replay there."""

    policy: Policy
    rate: float
    summary: Summary
    replays: int


def replay(pool: ReplayPool, policy: Policy, *, rate: float, limit: Ceiling) -> Replay:
    """Replay a trace at `rate` times its own speed. `limit` is the pool's ceiling.

    Raises ReplayStalled, SettingsInvalid.
    """
    world = World(
        trace=accelerate(pool.trace, rate),
        fleets=(ReplayFleet(workers=pool.workers, model=pool.model),),
        make_router=policy.router,
        routers=pool.routers,
        seed=pool.seed,
        deadline_s=pool.deadline_s,
        delays=pool.delays,
    )
    began = time.process_time()
    outcomes = world.run()
    facts = RunFacts(policy.label, workers=pool.workers, routers=pool.routers, seed=pool.seed, rate=rate)
    cpu_s = time.process_time() - began
    summary = summarise(outcomes, facts, ceiling=limit, decisions=world.decisions, cpu_s=cpu_s)
    return Replay(summary, outcomes)


def replay_classic(
    pool: ReplayPool, policy: Policy, *, rate: float, limit: Ceiling, sweep: Sequence[ClassicWeights] = SWEEP
) -> Replay:
    """Replay `classic` with the weights that give the lowest TTFT p90 at this rate, then the lowest mean."""

    def rank(done: Replay) -> tuple[float, float]:
        ttft = done.summary.ttft_s
        return _or_infinite(ttft.p90), _or_infinite(ttft.mean)

    return min((replay(pool, replace(policy, weights=weights), rate=rate, limit=limit) for weights in sweep), key=rank)


def find_knee(
    pool: ReplayPool,
    policy: Policy,
    *,
    limit: Ceiling,
    start: float = 4.0,
    precision: float = KNEE_PRECISION,
    progress: Callable[[Summary], None] | None = None,
) -> Knee | None:
    """Bisect the highest rate with TTFT p90 ≤ GOAL_TTFT_S, to this relative precision. None if even LOWEST_RATE is too much.

    Assumes that a higher rate never helps; where that does not hold, a knee between two rates that were tried is found."""
    count = 0
    best: Summary | None = None

    def bears(rate: float) -> bool:
        nonlocal best, count
        summary = replay(pool, policy, rate=rate, limit=limit).summary
        count += 1
        if progress is not None:
            progress(summary)
        good = _or_infinite(summary.ttft_s.p90) <= GOAL_TTFT_S
        if good and (best is None or rate > best.rate):
            best = summary
        return good

    low = high = start
    if bears(start):
        while high < HIGHEST_RATE:
            high = min(high * 1.5, HIGHEST_RATE)
            if not bears(high):
                break
            low = high
    else:
        while low > LOWEST_RATE:
            low = max(low / 1.5, LOWEST_RATE)
            if bears(low):
                break
            high = low
        else:
            return None
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if bears(middle):
            low = middle
        else:
            high = middle
    return None if best is None else Knee(policy=policy, rate=best.rate, summary=best, replays=count)


def find_classic_knee(
    pool: ReplayPool,
    policy: Policy,
    *,
    limit: Ceiling,
    sweep: Sequence[ClassicWeights] = SWEEP,
    precision: float = KNEE_PRECISION,
    progress: Callable[[Summary], None] | None = None,
) -> Knee | None:
    """Find the best knee of `classic` over all weights. Weights that fail at the best rate so far are passed over."""
    best: Knee | None = None
    for weights in sweep:
        tried = replace(policy, weights=weights)
        if best is not None:
            beyond = best.rate * (1 + precision)
            summary = replay(pool, tried, rate=beyond, limit=limit).summary
            if progress is not None:
                progress(summary)
            if _or_infinite(summary.ttft_s.p90) > GOAL_TTFT_S:
                continue
            knee = find_knee(pool, tried, limit=limit, start=beyond, precision=precision, progress=progress)
        else:
            knee = find_knee(pool, tried, limit=limit, precision=precision, progress=progress)
        if knee is not None and (best is None or knee.rate > best.rate):
            best = knee
    return best


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value
