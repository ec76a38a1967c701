"""What API keys and quotas cost a deployment: requests/s and the frontend's CPU with them against without, in turns.

Two deployments of the simulator with the `instant` timing run beside each other, and the client asks one after the other, in
the order A B B A. One has no keys; the other has keys in force, and the client's key has every kind of quota, of its own and of
its tenant. The median of the ratios of neighbouring rounds counts.

    python -m benchmarks.keys_cost [--rounds 12] [--streams 64] [--requests 1500] [--tokens 16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks.client import Workload, run_workload
from benchmarks.deployment import Deployment
from benchmarks.processes import processes_of, usage

ENOUGH = "1000000000"
LIMITS = ("rpm", "tpm", "concurrent", "tokens-per-day")


class Side:
    """One of the two deployments, and what was measured of it."""

    def __init__(self, name: str, deployment: Deployment, key: str) -> None:
        self.name = name
        self.deployment = deployment
        self.key = key
        self.frontend = processes_of(deployment.data_dir, deployment.pid)["frontend"]
        self.rates: list[float] = []
        self.cpu_us: list[float] = []

    async def round(self, workload: Workload, first: int) -> None:
        """Run the workload once. Raises SystemExit if a request failed."""
        before = usage(self.frontend).cpu_s
        outcome = await run_workload("127.0.0.1", self.deployment.port, workload, first=first, key=self.key)
        if outcome.failed:
            raise SystemExit(f"{self.name}: {outcome.failed} requests failed: {outcome.errors[0]}")
        self.rates.append(outcome.ok / outcome.seconds)
        self.cpu_us.append((usage(self.frontend).cpu_s - before) / outcome.ok * 1e6)


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
        del side.rates[0], side.cpu_us[0]


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--port", type=int, default=9790, help="the first of two")
    options = parser.parse_args()
    instant = ("--engine-arg", "timing=instant")
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        plain = Deployment(Path(one), options.port, 1, arguments=instant)
        keyed = Deployment(Path(two), options.port + 1, 1, arguments=(*instant, "--auth", "keys"))
        with plain, keyed:
            sides = [Side("no keys", plain, ""), Side("keys and quotas", keyed, limited_key(keyed))]
            workload = Workload(streams=options.streams, requests=options.requests, tokens=options.tokens)
            uvloop.run(compare(sides, workload, options.rounds))
    off, on = sides
    rates = [b / a for a, b in zip(off.rates, on.rates, strict=True)]
    cpu = [b - a for a, b in zip(off.cpu_us, on.cpu_us, strict=True)]
    for side in sides:
        print(f"{side.name:<16} {statistics.median(side.rates):8.0f} requests/s  {statistics.median(side.cpu_us):7.0f} µs")
    print(f"requests/s, on / off: median {statistics.median(rates):.3f}, from {min(rates):.3f} to {max(rates):.3f}")
    print(f"CPU of the frontend per request, on - off: median {statistics.median(cpu):+.0f} µs")
    print(f"{options.rounds} rounds of {options.requests} requests, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
