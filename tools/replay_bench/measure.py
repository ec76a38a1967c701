"""Measures a replay: hit rates, waits and balance."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.tools.replay_bench.engine import ReplayJob
from headrace.tools.replay_bench.trace import Ceiling
from headrace.tools.replay_bench.world import ReplayOutcome

GOAL_TTFT_S = 3.0


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a time in seconds. Requests that were shed count as infinitely late; infinite figures are None."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Unluckiest(msgspec.Struct, frozen=True, kw_only=True):
    """The request that waited longest from its arrival until its prefill began."""

    request: int
    wait_s: float
    tokens: int
    uncached: int
    request_class: str
    tenant: str


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measures a replay: hit rates, waits and balance. Rates are parts of 1; hits are in blocks."""

    policy: str
    routers: int
    seed: int
    rate: float  # factor on the trace's own
    requests_per_s: float  # offered
    requests: int
    shed: dict[str, int] = {}
    hit_rate: float
    of_infinite: float
    of_pooled: float
    balance_requests: float  # max / mean over the workers
    balance_uncached: float  # the same in computed prompt tokens
    ttft_s: Percentiles
    e2e_s: Percentiles
    goodput: float  # part of the requests with a first token within GOAL_TTFT_S
    goodput_per_s: float  # requests with a first token within GOAL_TTFT_S, from the first arrival to the last end
    window_wait_s: Percentiles | None = None  # in the router, until placed
    longest_wait: Unluckiest | None = None
    classes: dict[str, Percentiles] = {}  # TTFT
    ttft_error_s: Percentiles | None = None  # |predicted - actual|, of policies that predict
    decisions: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class RunFacts:
    """Facts of a replay that stand beside its figures: policy, pool sizes, seed, and the factor on the trace's own rate."""

    policy: str
    workers: int
    routers: int = 1
    seed: int = 0
    rate: float = 1.0


def summarise(
    outcomes: Sequence[ReplayOutcome], run: RunFacts, *, ceiling: Ceiling, decisions: int = 0, cpu_s: float = 0.0
) -> Summary:
    """Compute the figures of a replay in time."""
    served = [o for o in outcomes if not o.shed]
    jobs = [o.job for o in served]
    hit = hit_rate(jobs)
    first, last = outcomes[0].job.request.at_s, outcomes[-1].job.request.at_s
    ttft = [_ttft(o) for o in outcomes]
    good = sum(t <= GOAL_TTFT_S for t in ttft)
    end_s = max((j.end_s for j in jobs), default=last)
    by_class: dict[str, list[float]] = defaultdict(list)
    for o, t in zip(outcomes, ttft, strict=True):
        by_class[o.job.request.request_class].append(t)
    predicted = [abs(o.predicted_ttft_s - _ttft(o)) for o in served if o.predicted_ttft_s > 0]
    return Summary(
        policy=run.policy,
        routers=run.routers,
        seed=run.seed,
        rate=run.rate,
        requests_per_s=_ratio(len(outcomes) - 1, last - first),
        requests=len(outcomes),
        shed=dict(Counter(o.shed for o in outcomes if o.shed)),
        hit_rate=hit,
        of_infinite=_ratio(hit, ceiling.infinite),
        of_pooled=_ratio(hit, ceiling.pooled),
        balance_requests=balance((1 for _ in jobs), jobs, workers=run.workers),
        balance_uncached=balance((j.uncached for j in jobs), jobs, workers=run.workers),
        ttft_s=percentiles(ttft),
        e2e_s=percentiles([math.inf if o.shed else o.job.end_s - o.job.request.at_s for o in outcomes]),
        goodput=good / len(outcomes),
        goodput_per_s=_ratio(good, end_s - first),
        window_wait_s=percentiles([o.placed_s - o.job.request.at_s for o in served]) if served else None,
        longest_wait=_unluckiest(jobs),
        classes={name: percentiles(times) for name, times in sorted(by_class.items())} if len(by_class) > 1 else {},
        ttft_error_s=percentiles(predicted) if predicted else None,
        decisions=decisions,
        cpu_s=cpu_s,
    )


def hit_rate(jobs: Sequence[ReplayJob]) -> float:
    return _ratio(sum(j.cached_blocks for j in jobs), sum(len(j.request.chain) for j in jobs))


def balance(amounts: Iterable[float], jobs: Sequence[ReplayJob], *, workers: int) -> float:
    """Compute the largest amount of a worker over the mean."""
    per_worker = [0.0] * workers
    for amount, job in zip(amounts, jobs, strict=True):
        per_worker[job.worker] += amount
    return _ratio(max(per_worker) * workers, sum(per_worker))


def percentiles(times: Sequence[float]) -> Percentiles:
    """Compute percentiles by nearest rank. `times` must not be empty."""
    ordered = sorted(times)

    def at(part: float) -> float | None:
        return _finite(ordered[min(int(len(ordered) * part), len(ordered) - 1)])

    return Percentiles(
        mean=_finite(sum(ordered) / len(ordered)), p50=at(0.5), p90=at(0.9), p99=at(0.99), max=_finite(ordered[-1])
    )


def as_builtins(value: object) -> Any:
    """Convert to plain maps and lists with at most five digits after the point, for JSON."""
    plain = msgspec.to_builtins(value)
    return _rounded(plain)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _ttft(outcome: ReplayOutcome) -> float:
    return math.inf if outcome.shed else outcome.job.first_s - outcome.job.request.at_s


def _unluckiest(jobs: Sequence[ReplayJob]) -> Unluckiest | None:
    if not jobs:
        return None
    job = max(jobs, key=lambda j: j.admitted_s - j.request.at_s)
    return Unluckiest(
        request=job.index,
        wait_s=job.admitted_s - job.request.at_s,
        tokens=job.request.tokens,
        uncached=job.uncached,
        request_class=job.request.request_class,
        tenant=job.request.tenant,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
