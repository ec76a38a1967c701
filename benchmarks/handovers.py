"""Measures hand-overs of the simulator through everything, one after the other: push and pull, NIXL between two processes.

    python -m benchmarks.handovers

`instant` timing adds no modelled delay, so what is left is Headrace, NIXL and the simulator.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import openai

from benchmarks.deployment import Deployment
from benchmarks.disagg.path import new_ones

TOKENS = 512


def at(values: Sequence[float], part: float) -> str:
    """Return a quantile, in milliseconds."""
    return f"{1e3 * sorted(values)[int(part * (len(values) - 1))]:.1f}"


def measure(mode: str, requests: int, port: int) -> None:
    """Measure one transfer mode on a deployment of its own."""
    arguments = ["--mode", "disagg", "--prefill", "always", "--log-level", "debug", "--log-format", "json"]
    arguments += ["--engine-arg", f"transfer_mode={mode}"]
    rng, took = random.Random(1), []
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(Path(folder), port, 1, aggregated=False, arguments=arguments) as deployment,
    ):
        deployment.until("peer.met")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as api:
            for _ in range(requests):
                prompt = [rng.randrange(1000, 40_000) for _ in range(TOKENS)]
                began = time.perf_counter()
                api.completions.create(model=deployment.model, prompt=prompt, max_tokens=1)
                took.append(time.perf_counter() - began)
        handovers = [event["transfer_s"] for event in new_ones(deployment, {}, requests)]
        failed = deployment.log.count('"prefill.failed"')
    print(
        f"{mode}: {len(handovers)} hand-overs, {failed} failed; p50 {at(handovers, 0.5)}, p99 {at(handovers, 0.99)}, most"
        f" {at(handovers, 1)} ms; requests p50 {at(took, 0.5)}, p99 {at(took, 0.99)} ms, the first two {at(took[:1], 0)},"
        f" {at(took[1:2], 0)} ms"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--port", type=int, default=18500)
    arguments = parser.parse_args()
    for mode in ("push", "pull"):
        measure(mode, arguments.requests, arguments.port)


if __name__ == "__main__":
    main()
