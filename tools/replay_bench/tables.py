"""The report of a replay as text."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tools.replay_bench.compare import AROUND_KNEE
from headrace.tools.replay_bench.dynamo import DynamoFacts
from headrace.tools.replay_bench.measure import GOAL_TTFT_S, Percentiles, Summary
from headrace.tools.replay_bench.report import ReplayReport, Scenario, TimedRun
from headrace.tools.replay_bench.shares import TenantShare

_TIMED = (
    "POLICY", "HITS", "OF ∞", "OF POOL", "BALANCE", "TOKENS", "TTFT p50", "p90", "p99", "max",
    "E2E p50", "p90", "p99", f"≤{GOAL_TTFT_S:g} s", "good/s", "LONGEST WAIT", "SHED", "CPU s",
)  # fmt: skip
_SEQUENTIAL = ("POLICY", "HITS", "OF ∞", "OF POOL", "BALANCE", "TOKENS", "SHED", "CPU s")
_KNEE = ("POLICY", "RATE", "REQ/S", "× CLASSIC", "× ROUND-ROBIN", "HITS", "OF POOL", "TTFT p50", "p90", "max", "LONGEST WAIT")
_TENANT = ("TENANT", "WEIGHT", "REQUESTS", "TOKENS", "TTFT p90", "WINDOWS", "SHARE", "FAIR", "SHORT", "WORST")


def render(report: ReplayReport) -> str:
    """Render all scenarios, one after the other."""
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
