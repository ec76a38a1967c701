"""The command `headrace bench serve`: latencies of a running server, with CPU and memory of its processes."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.base.logs import configure
from headrace.chat import NoAnswer, served_models
from headrace.commands.progress import Progress
from headrace.router.errors import RouterError
from headrace.tools.argument_types import count, positive
from headrace.tools.bench.load import (
    Outcome,
    Target,
    bodies,
    poisson,
    run_at,
    run_closed,
    steady,
    target,
    trace_body,
    trace_times,
)
from headrace.tools.replay_bench.trace import Trace, read_trace
from headrace.up.runfile import read_run_file

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 16, 40
COLOURS = ("#1f6feb", "#d1661f", "#2e8b57", "#8250df")
MOST_POINTS = 200


def draw(curves: Mapping[str, Sequence[float]]) -> str:
    """Return the SVG of cumulative shares, by name, of values in milliseconds on a logarithmic axis."""
    shown = {name: sorted(value for value in values if value > 0) for name, values in curves.items()}
    shown = {name: values for name, values in shown.items() if values}
    low = floor(log10(min((values[0] for values in shown.values()), default=1.0)))
    high = max(low + 1, ceil(log10(max((values[-1] for values in shown.values()), default=10.0))))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]

    def x(value: float) -> float:
        return LEFT + (log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for percent in (0, 50, 90, 100):
        at = y(percent / 100)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">milliseconds</text>')
    for number, (name, values) in enumerate(shown.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = sorted({round(n * (len(values) - 1) / MOST_POINTS) for n in range(MOST_POINTS + 1)})
        line = " ".join(f"{x(values[place]):.1f},{y((place + 1) / len(values)):.1f}" for place in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 14 + 16 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far and resident bytes now."""

    cpu_s: float
    rss: int


def usage(pid: int) -> Usage:
    """Raises FileNotFoundError when the process is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return Usage((int(fields[11]) + int(fields[12])) * TICK_S, rss)


def processes_of(data_dir: Path, parent: int) -> dict[str, int]:
    """Return the process ids of the parts of a running `headrace up`, by a short name. Several frontends are numbered."""
    parts: dict[str, int] = {}
    frontends: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            group = (entry / "stat").read_text().rsplit(") ", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group[1]) != parent and int(entry.name) != parent:
            continue
        if "nats-server" in command:
            parts["nats-server"] = int(entry.name)
        elif " frontend" in command:
            frontends.append(int(entry.name))
        elif " router" in command:
            parts[f"router-{sum(name.startswith('router') for name in parts) + 1}"] = int(entry.name)
        elif " worker" in command:
            parts[f"worker-{sum(name.startswith('worker') for name in parts) + 1}"] = int(entry.name)
    if len(frontends) == 1:
        return parts | {"frontend": frontends[0]}
    return parts | {f"frontend-{number}": pid for number, pid in enumerate(sorted(frontends), 1)}


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


# `headrace bench serve`: asks a running server in a closed or an open loop, and reports latencies, CPU and memory.

URL = "http://127.0.0.1:8000"

_EXAMPLES = """examples:
  headrace bench serve                                      64 streams of 16 tokens, each asks again when it was answered
  headrace bench serve http://10.0.0.7:8000 --streams 8 --tokens 128 --requests 500
  headrace bench serve --rate 200 --poisson --json run.json --plot run.svg
  headrace bench serve --trace trace.jsonl --speed 2

Any server with OpenAI's streamed chats can be asked. CPU and memory are those of the `headrace up` on this machine."""


def add_serve(actions: Any) -> None:
    parser = actions.add_parser(
        "serve",
        help="ask a running server, and report latencies, CPU and memory",
        description="Ask a running server for streamed chats, and report latencies, CPU and memory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_serve, prog="headrace bench serve")
    add = parser.add_argument
    add("url", nargs="?", default=URL, help=f"of the server (default: {URL})")
    add("--model", help="default: the first that is served")
    add("--requests", type=count, default=2000, metavar="N", help="default: 2000; of a trace, its first N")
    add("--tokens", type=count, default=16, metavar="N", help="of each answer (default: 16)")
    add("--words", type=count, default=32, metavar="N", help="of each prompt (default: 32)")
    add("--streams", type=count, default=64, metavar="N", help="connections, each with one request at a time (default: 64)")
    add("--rate", type=positive, metavar="X", help="ask X requests a second instead, however many are under way")
    add("--poisson", action="store_true", help="with --rate: at random times, as independent clients do")
    add("--trace", type=Path, metavar="FILE", help="ask the requests of a Mooncake-format trace at their times instead")
    add("--speed", type=positive, default=1.0, metavar="X", help="with --trace: X times as fast (default: 1)")
    add("--warm-up", type=int, default=200, metavar="N", help="requests before, which do not count (default: 200)")
    add("--timeout", type=positive, default=600.0, metavar="SECONDS", help="for all requests (default: 600)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and random times (default: 0)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="default: the variable OPENAI_API_KEY")
    add("--data-dir", type=Path, default=Path(".headrace"), help="of the `headrace up` whose processes are measured")
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--plot", type=Path, metavar="FILE", help="draw the latencies here, as SVG")


def run_serve(parsed: argparse.Namespace) -> int:
    """Run the command. Returns 1 if a request failed. Raises CommandError."""
    configure(level="warning")
    if parsed.trace is not None and parsed.rate is not None:
        raise CommandError("--rate and --trace: one of them says when to ask")
    if parsed.poisson and parsed.rate is None:
        raise CommandError("--poisson needs --rate")
    model = parsed.model or _first_model(parsed.url, parsed.api_key)
    server = target(parsed.url, model, parsed.api_key)
    try:
        trace = read_trace(parsed.trace, limit=parsed.requests) if parsed.trace is not None else None
    except RouterError as error:
        raise CommandError(str(error)) from error
    outcome, report = uvloop.run(_measure(parsed, server, trace))
    if parsed.json is not None:
        _write(parsed.json, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    if parsed.plot is not None:
        _write(parsed.plot, draw(_curves(outcome)))
    sys.stdout.write(render(report))
    return EXIT_FAILURE if report.failed else EXIT_OK


async def _measure(parsed: argparse.Namespace, server: Target, trace: Trace | None) -> tuple[Outcome, ServeReport]:
    timeout_s = parsed.timeout
    if trace is None:
        asked = bodies(server.model, requests=parsed.requests, words=parsed.words, tokens=parsed.tokens, seed=parsed.seed)
    else:
        asked = [trace_body(server.model, request) for request in trace.requests]
    if parsed.warm_up > 0:
        first = bodies(server.model, requests=parsed.warm_up, words=parsed.words, tokens=parsed.tokens, seed=parsed.seed - 1)
        await run_closed(server, first, streams=min(parsed.streams, parsed.warm_up), timeout_s=timeout_s)
    pids = _processes(parsed.data_dir)
    before = _used(pids)
    with Progress(len(asked), "requests") as bar:
        if trace is not None:
            at_s = trace_times(trace, parsed.speed)
            outcome = await run_at(server, asked, at_s, timeout_s=timeout_s, on_end=bar.update)
        elif parsed.rate is not None:
            at_s = poisson(parsed.rate, len(asked), parsed.seed) if parsed.poisson else steady(parsed.rate, len(asked))
            outcome = await run_at(server, asked, at_s, timeout_s=timeout_s, on_end=bar.update)
        else:
            outcome = await run_closed(server, asked, streams=parsed.streams, timeout_s=timeout_s, on_end=bar.update)
    return outcome, make_report(outcome, before, _used(pids), _conditions(parsed, server))


def _conditions(parsed: argparse.Namespace, server: Target) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {"server": parsed.url, "model": server.model}
    if parsed.trace is not None:
        found |= {"trace": str(parsed.trace), "speed": parsed.speed}
    else:
        found |= {"tokens": parsed.tokens, "words": parsed.words}
        loop = f"open, {'Poisson' if parsed.poisson else 'steady'}"
        found |= {"loop": "closed", "streams": parsed.streams} if parsed.rate is None else {"loop": loop, "rate": parsed.rate}
    return found | {"seed": parsed.seed, "cores": os.cpu_count() or 0, "python": platform.python_version()}


def _curves(outcome: Outcome) -> dict[str, list[float]]:
    return {
        "first token": [value * 1e3 for value in outcome.first_token_s],
        "between tokens": [value * 1e3 for value, _ in outcome.gaps_s],
        "whole answer": [value * 1e3 for value in outcome.total_s],
    }


def _first_model(url: str, key: str) -> str:
    try:
        models = served_models(url, api_key=key)
    except NoAnswer as error:
        raise CommandError(str(error)) from error
    if not models:
        raise CommandError(f"{url}: no model is served")
    return models[0]


def _processes(data_dir: Path) -> dict[str, int]:
    running = read_run_file(data_dir.resolve())
    return processes_of(data_dir, running.pid) if running is not None and running.alive else {}


def _used(pids: dict[str, int]) -> dict[str, Usage]:
    found = {CLIENT: usage(os.getpid())}
    for name, pid in sorted(pids.items()):
        try:
            found[name] = usage(pid)
        except FileNotFoundError:  # it has ended: nothing is said of it
            continue
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
