"""Measures the growth of a deployment on a machine of many cores, and nats-server's limits: six minutes, without a network.

    python -m benchmarks.growth --json growth.json              # a machine with 16 cores
    python -m benchmarks.growth --quick --json growth.json      # does it work at all? two cores do

Deployments of 1 to 4 frontends, routers and simulator workers are asked by several client processes; the simulator's timing is
`instant`.  Then small programs load a nats-server of the same settings over raw sockets.  Each step has a deadline, one that
fails is named and left out, and the file is written anew after each.  When `--budget` seconds are over the rest is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.growth import broker_limits
from benchmarks.growth.clients import ClientFailed
from benchmarks.growth.serving_growth import KINDS, Load, Shape, measure
from headrace.base.logs import configure
from headrace.jetstream.errors import ConnectError

LOADS = (Load(64, 16), Load(256, 16), Load(64, 128))
SHAPES = (  # frontends, routers, workers, clients; the first again as the last shows how the machine drifts
    Shape(1, 1, 1, 4),
    Shape(2, 1, 1, 4),
    Shape(1, 2, 1, 4),
    Shape(1, 1, 2, 4),
    Shape(2, 2, 2, 4),
    Shape(2, 2, 4, 4),
    Shape(3, 3, 3, 5),
    Shape(4, 4, 4, 5),
    Shape(4, 2, 4, 5),
    Shape(4, 2, 4, 8),
    Shape(1, 0, 1, 4),
    Shape(4, 0, 4, 5),
    Shape(1, 1, 1, 4),
)
QUICK = (Shape(1, 1, 1, 2), Shape(2, 2, 2, 2))
BROKER_SHARE = 0.33  # of the budget, kept for the broker's steps
Rows = list[dict[str, Any]]


class Results:
    """Rows as they come, on the disk after each."""

    def __init__(self, path: Path | None, conditions: dict[str, Any]) -> None:
        self._path = path
        self.all: dict[str, Any] = {"conditions": conditions, "serving": [], "broker": [], "left_out": []}
        self._write()

    def add(self, kind: str, row: Any, line: str) -> None:
        """Keep a row, and show a line of it."""
        self.all[kind].append(row)
        print(line, flush=True)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self.all, indent=1))
            new.replace(self._path)


def guarded(results: Results, name: str, end_s: float, work: Callable[[], None]) -> None:
    """Do a step if there is time. Whatever goes wrong is named, and the next step comes."""
    if time.monotonic() >= end_s:
        results.add("left_out", f"{name}: no time", f"left out, no time: {name}")
        return
    try:
        work()
    except (ClientFailed, ConnectError, OSError, ValueError, KeyError, SystemExit) as error:
        results.add("left_out", f"{name}: {error!r}", f"FAILED {name}: {error!r}"[:600])


def serve(results: Results, shapes: Iterable[Shape], loads: Iterable[Load], seconds: float, end_s: float) -> None:
    """Measure all shapes."""
    for shape in shapes:

        def work(shape: Shape = shape) -> None:
            for row in measure(shape, loads, seconds, end_s):
                results.add("serving", row, serving_line(row))

        guarded(results, str(shape), end_s, work)


def load_broker(results: Results, seconds: float, end_s: float, quick: bool) -> None:
    """Measure all steps of the broker."""
    steps = [*broker_limits.core_steps(), *broker_limits.store_steps()]
    steps = [*(steps[::4] if quick else steps), *broker_limits.count_steps(quick)]
    for step in steps:

        def work(step: broker_limits.Step = step) -> None:
            row = broker_limits.measure(step, seconds)
            results.add("broker", row, broker_line(row))

        guarded(results, step.name, end_s, work)


def serving_line(row: dict[str, Any]) -> str:
    """Return a line of the table of deployments."""
    kinds = ", ".join(f"{row['cpu_us_by_kind'][kind]:.0f}" for kind in KINDS)
    busiest = max(row["cores_by_part"].items(), key=lambda one: one[1] if not one[0].startswith("nats") else 0.0)
    return (
        f"| {row['shape']} | {row['streams']} × {row['tokens']} | {row['req_s']:,.0f} | {row['chunks_s']:,.0f} "
        f"| {row['cpu_us']:.0f} | {kinds} | {row['ttft_p50_ms']:.1f} / {row['ttft_p99_ms']:.1f} "
        f"| {busiest[0]} {busiest[1]:.2f}; nats {row['cores_by_part'].get('nats-server', 0):.2f} "
        f"| {row['machine_cores']:.1f} | {row['clients']} × {row['busiest_client']:.2f} "
        f"| {row['broker_per_request'].get('in_msgs', 0):.1f} | {row['failed']} |"
    )


def broker_line(row: dict[str, Any]) -> str:
    """Return a line of the table of the broker's limits."""
    counted = ", ".join(f"{row[name]:,} {name}" for name in ("consumers", "streams", "subscriptions") if name in row)
    made = ", ".join(f"{row[name]:.2f} {name}" for name in ("ms_per_stream", "ms_per_consumer") if row[name])
    return (
        f"| {row['step']} | {counted} | {row['size']:,} | {row['messages_s']:,.0f} | {row['mib_s']:,.0f} "
        f"| {row['server_cores']:.2f} | {row['server_us_per_message']:.2f} | {row['server_rss_mib']:.0f} "
        f"| {row['busiest_client']:.2f} | {made} |"
    )


SERVING_HEAD = (
    f"\n| shape | streams × tokens | req/s | events/s | CPU µs per request | {', '.join(KINDS)} | TTFT p50 / p99 ms "
    "| busiest process, nats-server: cores | machine: cores | clients × busiest: core | messages in per request | failed |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
BROKER_HEAD = (
    "\n| step | numbers | bytes | messages/s | MiB/s | server: cores | µs per message | RSS MiB | busiest client | to make |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def ratios(rows: Rows) -> list[str]:
    """Return CPU per request and req/s of each row against the first row of the same load, which is of one of each."""
    lines, first = [], {}
    for row in rows:
        load = f"{row['streams']} × {row['tokens']}"
        one = first.setdefault(load, row)
        if one is not row and one["ok"] and row["ok"]:
            rate, cpu = row["req_s"] / one["req_s"], row["cpu_us"] / max(1.0, one["cpu_us"])
            lines.append(f"{row['shape']} ({row['clients']} clients), {load}: req/s × {rate:.2f}, CPU per request × {cpu:.2f}")
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes and few steps, a second each")
    parser.add_argument("--json", type=Path, help="write all figures here, after each step")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds in all (default: 330)")
    parser.add_argument("--only", choices=("serving", "broker"), help="leave the other out")
    args = parser.parse_args()
    configure(level="warning")
    end_s = time.monotonic() + args.budget
    conditions = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "quick": args.quick,
    }
    results = Results(args.json, conditions)
    print(json.dumps(conditions), flush=True)
    if args.only != "broker":
        serving_end_s = end_s - (0.0 if args.only else args.budget * BROKER_SHARE)
        print(SERVING_HEAD, flush=True)
        serve(results, QUICK if args.quick else SHAPES, LOADS, 1.0 if args.quick else 3.0, serving_end_s)
        print("\n".join(["", *ratios(results.all["serving"])]), flush=True)
    if args.only != "serving":
        print(BROKER_HEAD, flush=True)
        load_broker(results, 0.5 if args.quick else 1.5, end_s, args.quick)
    if results.all["left_out"] or any(row["failed"] for row in results.all["serving"]):
        sys.exit("some steps were left out, or some requests failed")


if __name__ == "__main__":
    main()
