"""Comparisons of policies on one pool: their records, and the report of `headrace bench replay` as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.tools.replay_bench.classic import SWEEP, ClassicWeights
from headrace.tools.replay_bench.measure import GOAL_TTFT_S, Percentiles, Summary
from headrace.tools.replay_bench.policies import CLASSIC, SWEPT, DynamoFacts, Policy
from headrace.tools.replay_bench.replay import (
    KNEE_PRECISION,
    Knee,
    Replay,
    ReplayPool,
    Sequential,
    find_classic_knee,
    find_knee,
    replay,
    replay_classic,
    replay_sequential,
)
from headrace.tools.replay_bench.shares import TenantShare, tenant_shares
from headrace.tools.replay_bench.trace import Ceiling, Trace


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requests: int
    duration_s: float
    requests_per_s: float
    blocks: int
    mean_tokens: float
    mean_output: float


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The ceiling, as in `ceiling.Ceiling`."""

    infinite: float
    pooled: float
    pooled_blocks: int


class TimedRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replay and, where there are several tenants, their shares."""

    summary: Summary
    tenants: list[TenantShare] = []


class KneeFound(msgspec.Struct, frozen=True, kw_only=True):
    """The highest sustainable rate, as a factor on the trace's own; None = below all that was tried."""

    policy: str
    rate: float | None
    requests_per_s: float | None
    to_classic: float | None = None
    to_round_robin: float | None = None
    at_knee: Summary | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    workers: int
    blocks: int
    routers: int
    ceiling: Ceilings
    sequential: list[Sequential] = []
    runs: list[TimedRun] = []
    knees: list[KneeFound] = []
    around_knee: list[TimedRun] = []  # at parts of the classic's knee, in the order of AROUND_KNEE


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    trace: TraceFacts
    seed: int
    scenarios: list[Scenario]
    dynamo: DynamoFacts | None = None  # where it took part


def facts(trace: Trace) -> TraceFacts:
    count = len(trace.requests)
    return TraceFacts(
        name=trace.name,
        requests=count,
        duration_s=trace.duration_s,
        requests_per_s=trace.rate,
        blocks=trace.blocks,
        mean_tokens=sum(r.tokens for r in trace.requests) / count,
        mean_output=sum(r.output for r in trace.requests) / count,
    )


ROUND_ROBIN = "round-robin"
AROUND_KNEE = (0.5, 0.8, 1.1)  # parts of the classic's knee at which all are compared


def _silent(_text: str) -> None:
    """Drop a line about progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measures policies on a pool.

    `sweep`: the weights of `classic` that are tried, of which the best count. `progress` gets a line about each measurement.
    """

    pool: ReplayPool
    policies: Sequence[Policy]
    sweep: Sequence[ClassicWeights] = SWEEP
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    precision: float = KNEE_PRECISION  # of knees, relative
    progress: Callable[[str], None] = _silent

    def sequential(self) -> Scenario:
        """Replay one request after the other. `classic` has its default weights: there is no load that they could weigh."""
        limit = self.pool.ceiling()
        done = []
        for policy in self.policies:
            done.append(replay_sequential(self.pool, policy, limit=limit))
            self.progress(f"{policy.label}, one after the other: hit rate {done[-1].hit_rate:.4f}")
        return self._scenario(limit, sequential=done)

    def in_time(self, rates: Sequence[float]) -> Scenario:
        """Replay every policy at every rate, `classic` at each with the weights that are best there."""
        limit = self.pool.ceiling()
        return self._scenario(limit, runs=[self._run(p, rate, limit) for rate in rates for p in self.policies])

    def knees(self) -> Scenario:
        """Find the sustainable load of every policy, then replay all of them at parts of that of `classic`.

        The weights of `classic` stay those of its knee.
        """
        limit = self.pool.ceiling()
        found = [(policy, self._knee(policy, limit)) for policy in self.policies]
        rates = {policy.name: knee.rate for policy, knee in found if knee is not None}
        classic = rates.get(CLASSIC)
        around: list[TimedRun] = []
        if classic is not None:
            best = [policy if knee is None else knee.policy for policy, knee in found]
            around = [self._timed(replay(self.pool, p, rate=part * classic, limit=limit)) for part in AROUND_KNEE for p in best]
        return self._scenario(
            limit,
            knees=[self._found(policy, knee, classic, rates.get(ROUND_ROBIN)) for policy, knee in found],
            around_knee=around,
        )

    def _knee(self, policy: Policy, limit: Ceiling) -> Knee | None:
        if policy.name in SWEPT:
            knee = find_classic_knee(self.pool, policy, limit=limit, sweep=self.sweep, precision=self.precision)
        else:
            knee = find_knee(self.pool, policy, limit=limit, precision=self.precision)
        self.progress(f"{policy.name}: no knee" if knee is None else f"{knee.policy.label}: knee at rate {knee.rate:.3f}")
        return knee

    def _run(self, policy: Policy, rate: float, limit: Ceiling) -> TimedRun:
        if policy.name in SWEPT:
            done = replay_classic(self.pool, policy, rate=rate, limit=limit, sweep=self.sweep)
        else:
            done = replay(self.pool, policy, rate=rate, limit=limit)
        return self._timed(done)

    def _timed(self, done: Replay) -> TimedRun:
        jobs = [o.job for o in done.outcomes if not o.shed]
        self.progress(f"{done.summary.policy} at rate {done.summary.rate:g}: TTFT p90 {_seconds(done.summary.ttft_s.p90)}")
        several = len({job.request.tenant for job in jobs}) > 1
        return TimedRun(summary=done.summary, tenants=tenant_shares(jobs, weights=self.tenant_weights) if several else [])

    def _found(self, policy: Policy, knee: Knee | None, classic: float | None, round_robin: float | None) -> KneeFound:
        if knee is None:
            return KneeFound(policy=policy.name, rate=None, requests_per_s=None)
        return KneeFound(
            policy=knee.policy.label,
            rate=knee.rate,
            requests_per_s=knee.rate * self.pool.trace.rate,
            to_classic=knee.rate / classic if classic else None,
            to_round_robin=knee.rate / round_robin if round_robin else None,
            at_knee=knee.summary,
        )

    def _scenario(self, limit: Ceiling, **measured: object) -> Scenario:
        empty = Scenario(
            workers=self.pool.workers,
            blocks=self.pool.model.blocks,
            routers=self.pool.routers,
            ceiling=Ceilings(infinite=limit.infinite, pooled=limit.pooled, pooled_blocks=limit.pooled_blocks),
        )
        return msgspec.structs.replace(empty, **measured)


def _seconds(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2f} s"


_TIMED = (
    "POLICY", "HITS", "OF ∞", "OF POOL", "BALANCE", "TOKENS", "TTFT p50", "p90", "p99", "max",
    "E2E p50", "p90", "p99", f"≤{GOAL_TTFT_S:g} s", "good/s", "LONGEST WAIT", "SHED", "CPU s",
)  # fmt: skip
_SEQUENTIAL = ("POLICY", "HITS", "OF ∞", "OF POOL", "BALANCE", "TOKENS", "SHED", "CPU s")
_KNEE = ("POLICY", "RATE", "REQ/S", "× CLASSIC", "× ROUND-ROBIN", "HITS", "OF POOL", "TTFT p50", "p90", "max", "LONGEST WAIT")
_TENANT = ("TENANT", "WEIGHT", "REQUESTS", "TOKENS", "TTFT p90", "WINDOWS", "SHARE", "FAIR", "SHORT", "WORST")


def render(report: ReplayReport) -> str:
    t = report.trace
    what = f"{t.name}: {t.requests} requests in {t.duration_s:.0f} s ({t.requests_per_s:.2f}/s)"
    each = f"{t.mean_tokens:.0f} prompt and {t.mean_output:.0f} output tokens on average"
    lines = [f"{what}, {each}, {t.blocks} blocks; seed {report.seed}"]
    for scenario in report.scenarios:
        lines += ["", *_scenario(scenario)]
    if report.dynamo is not None:
        lines += ["", _dynamo(report.dynamo)]
    return "\n".join(lines) + "\n"


def _dynamo(f: DynamoFacts) -> str:
    agreed = "/".join(f"{count / max(f.decisions, 1):.2%}" for count in (f.same_cached, f.same_in_use, f.lowest))
    what = "cached blocks, blocks in use and lowest cost as in classic"
    return f"dynamo: {f.decisions} decisions, {what} in {agreed}; median time of one {f.took_s * 1e6:.0f} µs"


def _scenario(scenario: Scenario) -> list[str]:
    limit = scenario.ceiling
    routers = "1 router" if scenario.routers == 1 else f"{scenario.routers} routers"
    pool = f"{scenario.workers} workers × {scenario.blocks} blocks, {routers}"
    pooled = f"of one LRU cache of {limit.pooled_blocks} blocks {limit.pooled:.3f}"
    lines = [f"{pool}; hit rate of an infinite cache {limit.infinite:.3f}, {pooled}"]
    if scenario.sequential:
        rows: list[Sequence[str]] = [_SEQUENTIAL]
        rows += [(s.policy, *_hits(s), str(sum(s.shed.values())), f"{s.cpu_s:.1f}") for s in scenario.sequential]
        lines += ["", "one after the other, without timing", *_table(rows)]
    lines += _timed(scenario.runs)
    if scenario.knees:
        lines += [
            "",
            f"sustainable load: highest rate with TTFT p90 ≤ {GOAL_TTFT_S:g} s",
            *_table([_KNEE, *_knee_rows(scenario)]),
        ]
    if scenario.around_knee:
        parts = ", ".join(f"{part:g}" for part in AROUND_KNEE)
        lines += ["", f"at {parts} × the sustainable load of classic", *_timed(scenario.around_knee)[1:]]
    return lines


def _timed(runs: Sequence[TimedRun]) -> list[str]:
    lines: list[str] = []
    for rate in dict.fromkeys(run.summary.rate for run in runs):
        mine = [run for run in runs if run.summary.rate == rate]
        lines += ["", f"rate {rate:g}: {mine[0].summary.requests_per_s:.2f} requests/s"]
        lines += _table([_TIMED, *(_timed_row(run.summary) for run in mine)])
        for run in mine:
            lines += _classes(run.summary)
        for run in mine:
            if run.tenants:
                lines += ["", f"tenants under {run.summary.policy}", *_table([_TENANT, *map(_tenant_row, run.tenants)])]
    return lines


def _timed_row(s: Summary) -> tuple[str, ...]:
    ttft, e2e, shed = s.ttft_s, s.e2e_s, sum(s.shed.values())
    times = (ttft.p50, ttft.p90, ttft.p99, ttft.max, e2e.p50, e2e.p90, e2e.p99)
    goodput = f"{s.goodput:.1%}", f"{s.goodput_per_s:.2f}"
    return (s.policy, *_hits(s), *map(_time, times), *goodput, _longest(s), str(shed), f"{s.cpu_s:.1f}")


def _hits(s: Summary | object) -> tuple[str, ...]:
    values = (getattr(s, name) for name in ("hit_rate", "of_infinite", "of_pooled", "balance_requests", "balance_uncached"))
    return tuple(f"{value:.3f}" for value in values)


def _knee_rows(scenario: Scenario) -> list[tuple[str, ...]]:
    rows = []
    for k in scenario.knees:
        if k.rate is None or k.at_knee is None:
            rows.append((k.policy, "none", *[""] * (len(_KNEE) - 2)))
            continue
        s = k.at_knee
        rows.append(
            (
                k.policy,
                f"{k.rate:.3f}",
                f"{k.requests_per_s:.2f}",
                "" if k.to_classic is None else f"{k.to_classic:.2f}",
                "" if k.to_round_robin is None else f"{k.to_round_robin:.2f}",
                f"{s.hit_rate:.3f}",
                f"{s.of_pooled:.3f}",
                *map(_time, (s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.max)),
                _longest(s),
            )
        )
    return rows


def _classes(s: Summary) -> list[str]:
    def one(name: str, ttft: Percentiles) -> str:
        return f"{name} {_time(ttft.p50)} / {_time(ttft.p90)} / {_time(ttft.max)}"

    if not s.classes:
        return []
    return [f"  {s.policy}, TTFT p50 / p90 / max by class: " + ", ".join(one(*item) for item in s.classes.items())]


def _tenant_row(t: TenantShare) -> tuple[str, ...]:
    compared = (str(t.windows), f"{t.share:.3f}", f"{t.fair:.3f}", str(t.short), "" if t.worst is None else f"{t.worst:+.1%}")
    return (t.tenant, f"{t.weight:g}", str(t.requests), f"{t.tokens:.0f}", _time(t.ttft_p90_s), *compared)


def _longest(s: Summary) -> str:
    w = s.longest_wait
    return "" if w is None else f"{w.wait_s:.1f} s ({w.uncached} tokens)"


def _time(value: float | None) -> str:
    return "∞" if value is None else f"{value:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
