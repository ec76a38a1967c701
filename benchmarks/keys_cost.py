"""Measures API keys with quotas, logins at nats-server, or the access log: requests/s and CPU of a deployment with and without.

Two deployments of the simulator with the `instant` timing run beside each other, and the client asks one after the other, in
the order A B B A. One has neither; the other has what is asked for: keys in force, with every kind of quota of the client's key
and of its tenant, or logins at nats-server, or an access log (of the same level, to a file). The median of the ratios of
neighbouring rounds counts.

    python -m benchmarks.keys_cost [--what keys|logins|access-log] [--routers 1] [--rounds 12] [--streams 64] [--requests 1500]
    python -m benchmarks.keys_cost --what logins --starts 5      # how long a deployment takes to be ready, in turns
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.client import Workload, run_workload
from benchmarks.deployment import Deployment
from headrace.tools.bench.serve import processes_of, usage

ENOUGH = "1000000000"
LIMITS = ("rpm", "tpm", "concurrent", "tokens-per-day")
INSTANT = ("--engine-arg", "timing=instant")
WITH = {"keys": ("--auth", "keys"), "logins": ("--nats-login", "roles"), "login": (), "access-log": ("--log-level", "info")}
NO_LOGIN = ("--nats-login", "none")
WITHOUT = {"logins": NO_LOGIN, "login": NO_LOGIN, "access-log": ("--log-level", "info", "--no-access-log")}


class Side:
    """A deployment of the two, and its figures."""

    def __init__(self, name: str, deployment: Deployment, key: str) -> None:
        self.name = name
        self.deployment = deployment
        self.key = key
        while "frontend" not in (parts := processes_of(deployment.data_dir, deployment.pid)):
            time.sleep(0.2)  # a part that has just been started may not have its command line yet
        self.frontend = parts["frontend"]
        self.parts = {**parts, "up": deployment.pid}
        self.rates: list[float] = []
        self.cpu_us: list[float] = []  # of the frontend, per request
        self.all_cpu_us: list[float] = []  # of all parts, with nats-server and `up`
        self.by_part_us: dict[str, list[float]] = {name: [] for name in self.parts}

    async def round(self, workload: Workload, first: int) -> None:
        """Run the workload once. Raises SystemExit if a request failed."""
        before = self._cpu_s()
        outcome = await run_workload("127.0.0.1", self.deployment.port, workload, first=first, key=self.key)
        if outcome.failed:
            log = self.deployment.log[-4000:]
            raise SystemExit(f"{self.name}: {outcome.failed} requests failed: {outcome.errors[0]}\n{log}")
        self.rates.append(outcome.ok / outcome.seconds)
        used_us = {name: (cpu_s - before[name]) / outcome.ok * 1e6 for name, cpu_s in self._cpu_s().items()}
        self.cpu_us.append(used_us["frontend"])
        self.all_cpu_us.append(sum(used_us.values()))
        for name, us in used_us.items():
            self.by_part_us[name].append(us)

    def _cpu_s(self) -> dict[str, float]:
        return {name: usage(pid).cpu_s for name, pid in self.parts.items()}


def limited_key(deployment: Deployment) -> str:
    """Make a key with every limit, none of which is reached."""
    flags = [word for name in LIMITS for kind in ("", "tenant-") for word in (f"--{kind}{name}", ENOUGH)]
    command = [sys.executable, "-P", "-m", "headrace", "keys", "create", "bench", "--json", "--data-dir"]
    made = subprocess.run([*command, str(deployment.data_dir), *flags], capture_output=True, text=True, check=True)
    return str(json.loads(made.stdout)["secret"])


async def compare(sides: list[Side], workload: Workload, rounds: int) -> None:
    """Run the rounds in turns, after one that warms up."""
    first = 0
    for number in range(rounds + 1):
        for side in sides if number % 2 else sides[::-1]:
            await side.round(workload, first)
            first += workload.requests
    for side in sides:
        for figures in (side.rates, side.cpu_us, side.all_cpu_us, *side.by_part_us.values()):
            del figures[0]


def serve(options: argparse.Namespace) -> None:
    """Measure requests/s and CPU, and print medians and ratios."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        arguments = (*INSTANT, *WITHOUT.get(options.what, ()))
        plain = Deployment(Path(one), options.port, 1, routers=options.routers, arguments=arguments)
        arguments = (*INSTANT, *WITH[options.what])
        measured = Deployment(Path(two), options.port + 1, 1, routers=options.routers, arguments=arguments)
        with plain, measured:
            key = limited_key(measured) if options.what == "keys" else ""
            sides = [Side("without", plain, ""), Side(f"with {options.what}", measured, key)]
            workload = Workload(streams=options.streams, requests=options.requests, tokens=options.tokens)
            uvloop.run(compare(sides, workload, options.rounds))
    off, on = sides
    for side in sides:
        print(
            f"{side.name:<12} {statistics.median(side.rates):6.0f} requests/s, CPU per request: frontend "
            f"{statistics.median(side.cpu_us):5.0f} µs, all parts {statistics.median(side.all_cpu_us):5.0f} µs"
        )
    for name, used in off.by_part_us.items():
        print(f"{name:<12} {statistics.median(used):5.0f} µs without, {statistics.median(on.by_part_us[name]):5.0f} with")
    print(f"requests/s, with / without: {spread(off.rates, on.rates)}")
    print(f"CPU of the frontend per request, with / without: {spread(off.cpu_us, on.cpu_us)}")
    print(f"CPU of all parts per request, with / without: {spread(off.all_cpu_us, on.all_cpu_us)}")
    print(f"{options.rounds} rounds of {options.requests} requests, load average {os.getloadavg()[0]:.1f}")


def spread(off: Sequence[float], on: Sequence[float]) -> str:
    """Return the median ratio of neighbouring rounds, and the least and the largest."""
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    return f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"


def start(options: argparse.Namespace) -> None:
    """Measure the seconds from the start of `headrace up` until its worker can answer, and print medians."""
    seconds: dict[str, list[float]] = {"without": [], f"with {options.what}": []}
    for number in range(options.starts):
        for name, took in list(seconds.items())[:: 1 if number % 2 else -1]:
            arguments = INSTANT if name == "without" else (*INSTANT, *WITH[options.what])
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                with Deployment(Path(folder), options.port, 1, routers=options.routers, arguments=arguments):
                    took.append(time.monotonic() - began)
    off, on = seconds.values()
    for name, took in seconds.items():
        print(f"{name:<12} ready after {statistics.median(took):.2f} s, from {min(took):.2f} to {max(took):.2f}")
    print(f"with / without: {spread(off, on)}; {options.starts} starts each, load average {os.getloadavg()[0]:.1f}")


def main() -> None:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=tuple(WITH), default="keys")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--routers", type=int, default=0)
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="measure N starts instead")
    parser.add_argument("--port", type=int, default=9790, help="the first of two")
    options = parser.parse_args()
    (start if options.starts else serve)(options)


if __name__ == "__main__":
    main()
