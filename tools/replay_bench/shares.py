"""Shares of tenants in the work, over windows of time, against fair shares.

The share of a tenant is counted in uncached prompt tokens, while they are computed, and in output tokens, from the first to the
last. Fair is max-min: the work of the window is divided by weight, but no tenant is given more than it asked for, and the
others share the rest. A tenant asks for the work that it got and for the work that still waits at the end of the window. Only
windows count in which some request waited all the time: otherwise no tenant was short of anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.tools.replay_bench.engine import ReplayJob

WINDOW_S = 60.0
STRIDE_S = 15.0
SATURATED = 0.99  # part of a saturated window in which some request waited
SHORTEST_PART_S = 1e-6


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a tenant, as part of all work in a window: the mean over the saturated windows in which it asked for work.

    `short` counts the windows in which it wanted more than its fair part, so that its weight set the limit; `worst` is the
    share / fair - 1 farthest from 0 in these, None without any.
    """

    tenant: str
    weight: float
    requests: int
    tokens: float  # uncached and output, over the whole replay
    ttft_p90_s: float
    windows: int
    short: int
    share: float
    fair: float
    worst: float | None = None


@dataclass(frozen=True, slots=True)
class _Window:
    """A tenant in a window: parts of all work."""

    share: float
    fair: float
    short: bool


def tenant_shares(
    jobs: Sequence[ReplayJob], *, weights: Mapping[str, float] | None = None, window_s: float = WINDOW_S
) -> list[TenantShare]:
    """Compute the shares, in the order of the tenants' names. A tenant without a weight has 1."""
    weights = weights or {}
    by_tenant: dict[str, list[ReplayJob]] = defaultdict(list)
    for job in jobs:
        by_tenant[job.request.tenant].append(job)
    waiting = _union((j.request.at_s, j.admitted_s) for j in jobs)
    seen: dict[str, list[_Window]] = {tenant: [] for tenant in by_tenant}
    for start_s in _starts(max((job.end_s for job in jobs), default=0.0), window_s):
        end_s = start_s + window_s
        if _covered(waiting, start_s, end_s) < SATURATED * window_s:
            continue
        got = {t: sum(_within(j, start_s, end_s) for j in mine) for t, mine in by_tenant.items()}
        asked = {t: got[t] + sum(map(_tokens, _still_waiting(mine, end_s))) for t, mine in by_tenant.items()}
        asking = {t: tokens for t, tokens in asked.items() if tokens > 0}
        total = sum(got.values())
        if total <= 0:
            continue
        fair = max_min(total, asking, weights)
        for t in asking:
            seen[t].append(_Window(got[t] / total, fair[t] / total, fair[t] < asking[t]))
    return [_share(tenant, by_tenant[tenant], weights.get(tenant, 1.0), seen[tenant]) for tenant in sorted(by_tenant)]


def max_min(amount: float, asked: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide `amount` by weight (1 unless given), giving no tenant more than it asks for."""
    fair: dict[str, float] = {}
    open_weight = sum(weights.get(t, 1.0) for t in asked)
    # The tenants that are content soonest come first: after each, the rest per weight can only have grown.
    for t in sorted(asked, key=lambda t: asked[t] / weights.get(t, 1.0)):
        weight = weights.get(t, 1.0)
        fair[t] = min(asked[t], amount * weight / open_weight)
        amount -= fair[t]
        open_weight -= weight
    return fair


def _share(tenant: str, jobs: Sequence[ReplayJob], weight: float, windows: Sequence[_Window]) -> TenantShare:
    times = sorted(j.first_s - j.request.at_s for j in jobs)
    count = len(windows) or 1
    deviations = [w.share / w.fair - 1 for w in windows if w.short]
    return TenantShare(
        tenant=tenant,
        weight=weight,
        requests=len(jobs),
        tokens=float(sum(map(_tokens, jobs))),
        ttft_p90_s=times[min(int(len(times) * 0.9), len(times) - 1)],
        windows=len(windows),
        short=len(deviations),
        share=sum(w.share for w in windows) / count,
        fair=sum(w.fair for w in windows) / count,
        worst=max(deviations, key=abs) if deviations else None,
    )


def _tokens(job: ReplayJob) -> int:
    return job.uncached + job.request.output


def _still_waiting(jobs: Sequence[ReplayJob], at_s: float) -> Iterator[ReplayJob]:
    return (j for j in jobs if j.request.at_s < at_s <= j.admitted_s)


def _starts(end_s: float, window_s: float) -> Iterator[float]:
    start_s = 0.0
    while start_s + window_s <= end_s:
        yield start_s
        start_s += STRIDE_S


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((start_s, end_s))
    return joined


def _covered(spans: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    return sum(max(0.0, min(b, end_s) - max(a, start_s)) for a, b in spans)


def _within(job: ReplayJob, start_s: float, end_s: float) -> float:
    """Count the tokens of the job that fall into the window."""
    prompt = job.uncached * _part(job.admitted_s, job.first_s, start_s, end_s)
    return prompt + job.request.output * _part(job.first_s, job.end_s, start_s, end_s)


def _part(from_s: float, to_s: float, start_s: float, end_s: float) -> float:
    if to_s - from_s < SHORTEST_PART_S:
        return 1.0 if start_s <= from_s < end_s else 0.0
    return max(0.0, min(to_s, end_s) - max(from_s, start_s)) / (to_s - from_s)
