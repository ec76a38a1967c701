"""Reports a run of `headrace bench serve`: percentiles, and CPU and memory of each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headrace.tools.serve_bench.connection import Outcome
from headrace.tools.serve_bench.processes import Usage

PERCENTS = (50, 90, 99)
CLIENT = "client"
BUSY_CLIENT = 0.7  # of a core: above it, the client may be what is measured


class Latency(msgspec.Struct, frozen=True):
    """Percentiles in milliseconds; None without a value."""

    p50: float | None
    p90: float | None
    p99: float | None
    most: float | None


class ProcessUse(msgspec.Struct, frozen=True):
    """CPU and memory of a process while the requests ran."""

    cores: float
    us_per_request: float
    rss_mib: float


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run. Times of `conditions` are in seconds."""

    conditions: dict[str, str | int | float]
    seconds: float
    ok: int
    failed: int
    requests_per_s: float
    tokens_per_s: float  # events with text
    ttft: Latency
    itl: Latency
    e2e: Latency
    processes: dict[str, ProcessUse]
    errors: list[str]


def latency(values: Sequence[tuple[float, int]]) -> Latency:
    """Return the percentiles of values in seconds, each with the number of times that it counts."""
    ordered = sorted(values)
    total = sum(times for _, times in ordered)
    found: list[float] = []
    seen = 0
    wanted = [total * percent / 100 for percent in PERCENTS]
    for value, times in ordered:
        seen += times
        while len(found) < len(wanted) and seen >= wanted[len(found)]:
            found.append(value * 1e3)
    if not ordered:
        return Latency(None, None, None, None)
    return Latency(found[0], found[1], found[2], ordered[-1][0] * 1e3)


def make_report(
    outcome: Outcome,
    before: Mapping[str, Usage],
    after: Mapping[str, Usage],
    conditions: dict[str, str | int | float],
) -> ServeReport:
    """Put the figures of a run together. `before` and `after`: what each process had used, the client among them."""
    seconds, ok = max(outcome.seconds, 1e-9), max(outcome.ok, 1)
    used = {name: after[name].cpu_s - before[name].cpu_s for name in before if name in after}
    return ServeReport(
        conditions=conditions,
        seconds=outcome.seconds,
        ok=outcome.ok,
        failed=outcome.failed,
        requests_per_s=outcome.ok / seconds,
        tokens_per_s=outcome.chunks / seconds,
        ttft=latency([(value, 1) for value in outcome.first_token_s]),
        itl=latency(outcome.gaps_s),
        e2e=latency([(value, 1) for value in outcome.total_s]),
        processes={
            name: ProcessUse(cpu_s / seconds, cpu_s / ok * 1e6, after[name].rss / 2**20) for name, cpu_s in used.items()
        },
        errors=sorted(set(outcome.errors))[:5],
    )


def render(report: ServeReport) -> str:
    """Return the report as text for a terminal."""
    lines = [
        ", ".join(f"{name} {value}" for name, value in report.conditions.items()),
        f"{report.ok} answered, {report.failed} failed in {report.seconds:.1f} s",
        f"{report.requests_per_s:,.1f} requests/s, {report.tokens_per_s:,.0f} tokens/s",
        "",
        f"{'ms':16}{'p50':>10}{'p90':>10}{'p99':>10}{'most':>10}",
    ]
    for name, one in (("first token", report.ttft), ("between tokens", report.itl), ("whole answer", report.e2e)):
        figures = (one.p50, one.p90, one.p99, one.most)
        lines.append(f"{name:16}" + "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in figures))
    lines += ["", f"{'CPU':16}{'cores':>10}{'us/request':>12}{'MiB':>8}"]
    lines += [
        f"{name:16}{use.cores:>10.2f}{use.us_per_request:>12.0f}{use.rss_mib:>8.0f}" for name, use in report.processes.items()
    ]
    if (client := report.processes.get(CLIENT)) is not None and client.cores > BUSY_CLIENT:
        lines.append(f"\nThe client used {client.cores:.2f} of its one core: it may be what was measured.")
    lines += [f"\n{error}" for error in report.errors]
    return "\n".join(lines) + "\n"
