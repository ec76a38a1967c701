"""The serving benchmark: a whole deployment on this machine against the closed-loop client.

    .venv/bin/python -m benchmarks.serving                    # 1, 16 and 64 streams of 16, 64 streams of 128
    .venv/bin/python -m benchmarks.serving --runs 5 --workers 2 --json out.json

The engine is the simulator with the `instant` timing, so what is left is Headrace: HTTP, validation, template, tokeniser,
queue, placement, frames, SSE.  Everything shares the machine's cores, the client too.  The added time to first token is
measured against the same engine called in-process in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.client import Outcome, Workload, run_workload
from benchmarks.deployment import Deployment
from benchmarks.direct import direct_first_token_s
from headrace.tools.bench.serve import Usage, processes_of, usage

WORKLOADS = (
    Workload(streams=1, requests=400, tokens=16),
    Workload(streams=16, requests=3000, tokens=16),
    Workload(streams=64, requests=8000, tokens=16),
    Workload(streams=64, requests=2000, tokens=128),
)


def snapshot(parts: dict[str, int]) -> dict[str, Usage]:
    """Return the usage of each process so far."""
    return {name: usage(pid) for name, pid in parts.items()} | {"client": usage(os.getpid())}


def parts_of(data_dir: Path, pid: int, *, routers: int) -> dict[str, int]:
    """Return the processes of a deployment, by name. Waits for its routers, which start last and are not needed to answer.

    Raises SystemExit if a router is missing after 30 s: its share would be left out of the figures.
    """
    end = time.monotonic() + 30.0
    while True:
        parts = processes_of(data_dir, pid)
        if sum(name.startswith("router") for name in parts) == routers:
            return parts
        if time.monotonic() > end:
            raise SystemExit(f"{routers} router(s) were asked for, these parts run: {', '.join(parts)}")
        time.sleep(0.1)


def row(workload: Workload, outcome: Outcome, before: dict[str, Usage], after: dict[str, Usage]) -> dict[str, object]:
    """Return one line of the table, as figures. `cpu` is in cores."""
    return {
        "streams": workload.streams,
        "tokens": workload.tokens,
        "requests": outcome.ok,
        "failed": outcome.failed,
        "req_s": outcome.ok / outcome.seconds,
        "chunks_s": outcome.chunks / outcome.seconds,
        "ttft_p50_ms": outcome.percentile_ms("first_token_s", 0.5),
        "ttft_p99_ms": outcome.percentile_ms("first_token_s", 0.99),
        "total_p50_ms": outcome.percentile_ms("total_s", 0.5),
        "cpu": {name: (after[name].cpu_s - before[name].cpu_s) / outcome.seconds for name in before},
        "cpu_us_per_request": {name: (after[name].cpu_s - before[name].cpu_s) / max(1, outcome.ok) * 1e6 for name in before},
        "rss_mib": {name: after[name].rss / 2**20 for name in before},
        "errors": outcome.errors[:3],
    }


def median_rows(runs: list[list[dict[str, object]]]) -> list[dict[str, object]]:
    """Per workload the run with the median request rate: whole rows, so that their figures belong together."""
    chosen = []
    for rows in zip(*runs, strict=True):
        rates = sorted(rows, key=lambda r: r["req_s"])  # type: ignore[arg-type,return-value]
        median = rates[len(rates) // 2]
        chosen.append(median | {"req_s_min": rates[0]["req_s"], "req_s_max": rates[-1]["req_s"]})
    return chosen


def total(figures: dict[str, float], part: str) -> float:
    """Sum over all processes of one kind."""
    return sum(value for name, value in figures.items() if name.startswith(part))


def table(rows: list[dict[str, object]]) -> str:
    """Return the figures as Markdown."""
    lines = [
        (
            "| streams × tokens | req/s (min–max) | chunks/s | TTFT p50 / p99 ms "
            "| CPU cores: frontend, router, workers, nats, client | the same in µs per request | RSS MiB |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cpu: dict[str, float] = r["cpu"]  # type: ignore[assignment]
        rss: dict[str, float] = r["rss_mib"]  # type: ignore[assignment]
        each: dict[str, float] = r["cpu_us_per_request"]  # type: ignore[assignment]
        routers, workers = total(cpu, "router"), total(cpu, "worker")
        lines.append(
            f"| {r['streams']} × {r['tokens']} | {r['req_s']:,.0f} ({r['req_s_min']:,.0f}–{r['req_s_max']:,.0f}) "
            f"| {r['chunks_s']:,.0f} | {r['ttft_p50_ms']:.1f} / {r['ttft_p99_ms']:.1f} "
            f"| {cpu.get('frontend', 0):.2f}, {routers:.2f}, {workers:.2f}, "
            f"{cpu.get('nats-server', 0):.2f}, {cpu['client']:.2f} "
            f"| {each.get('frontend', 0):.0f}, {total(each, 'router'):.0f}, {total(each, 'worker'):.0f}, "
            f"{each.get('nats-server', 0):.0f}, {each['client']:.0f} "
            f"| {', '.join(f'{k} {v:.0f}' for k, v in rss.items() if k != 'client')} |"
        )
    return "\n".join(lines)


async def measure(args: argparse.Namespace, parts: dict[str, int]) -> list[list[dict[str, object]]]:
    """Measure every workload, `runs` times in turn."""
    workloads = [
        Workload(w.streams, max(w.streams, int(w.requests * args.scale)), w.tokens, w.prompt_words, w.model) for w in WORKLOADS
    ]
    first = 1_000_000
    await run_workload("127.0.0.1", args.port, Workload(16, 500, 16), first=first)  # warm up
    runs = []
    for n in range(args.runs):
        rows = []
        for workload in workloads:
            first += workload.requests
            before = snapshot(parts)
            outcome = await run_workload("127.0.0.1", args.port, workload, first=first)
            rows.append(row(workload, outcome, before, snapshot(parts)))
            print(
                f"run {n + 1}: {workload.streams} x {workload.tokens}: {rows[-1]['req_s']:.0f} req/s, "
                f"{rows[-1]['chunks_s']:.0f} chunks/s, TTFT p50 {rows[-1]['ttft_p50_ms']:.2f} ms, failed {outcome.failed}",
                file=sys.stderr,
            )
        runs.append(rows)
    return runs


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--routers", type=int, default=1, help="1 is what `headrace up` runs; with 0 workers place requests on themselves"
    )
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of requests")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        arguments = ["--engine-arg", f"slots={args.slots}"]
        with Deployment(data_dir, args.port, args.workers, routers=args.routers, arguments=arguments) as deployment:
            runs = uvloop.run(measure(args, parts_of(data_dir, deployment.pid, routers=args.routers)))
    direct = uvloop.run(direct_first_token_s(200))
    rows = median_rows(runs)
    light = rows[0]["ttft_p50_ms"]
    conditions = (
        f"{os.cpu_count()} cores shared by everything, Python {platform.python_version()}, {args.workers} worker(s), "
        f"{args.routers} router(s), "
        f"median of {args.runs} run(s)"
    )
    print(f"\n{conditions}\n\n{table(rows)}\n")
    print(
        f"Engine called in-process: TTFT p50 {statistics.median(direct) * 1e3:.2f} ms; "
        f"added at 1 stream: p50 {light - statistics.median(direct) * 1e3:.2f} ms"  # type: ignore[operator]
    )
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions, "direct_s": direct, "runs": runs}, indent=1))
    if any(r["failed"] for rows in runs for r in rows):
        raise SystemExit("some requests failed")


if __name__ == "__main__":
    main()
