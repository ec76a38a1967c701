"""Measures the time that the remote path adds to the first token, through HTTP, router, prefill queue and two engines.

    python benchmarks/disagg/path.py                      # the real model, minutes
    python benchmarks/disagg/path.py --engine sim

One prefill and one decode worker; routers that always, and never, have prompts computed remotely take turns beside them, so
both ways are measured on the same processes in the same minutes.  Every prompt is new, one request at a time.  The parts are
what the decode worker logs of each hand-over: in the queue (from the job's creation to the prefill engine), in the prefill
engine, and from its blocks being ready to the first token (transfer and first step).  What is left is HTTP, placement and the
start of the run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import openai

from benchmarks.deployment import Deployment, Router

LENGTHS = (128, 512, 1500)
PARTS = ("queue_s", "prefill_s", "transfer_s")
VOCABULARY = (1000, 40_000)
LOG_S = 5.0


class Ways:
    """Times to first token by way and prompt length, and the parts of the remote ones."""

    def __init__(self) -> None:
        self.first_s: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.parts: dict[int, list[dict[str, float]]] = defaultdict(list)

    def table(self) -> str:
        rows = ["prompt   local ms   remote ms   added ms   =  queue  prefill  transfer+step  rest    remote/local"]
        for length in LENGTHS:
            local, remote = (1e3 * statistics.median(self.first_s[way, length]) for way in ("never", "always"))
            parts = [1e3 * statistics.median(one[part] for one in self.parts[length]) for part in PARTS]
            rows.append(
                f"{length:>6} {local:>10.1f} {remote:>11.1f} {remote - local:>10.1f}     {parts[0]:>6.1f} {parts[1]:>8.1f}"
                f" {parts[2]:>14.1f} {remote - sum(parts):>5.1f} {remote / local:>15.2f}"
            )
        return "\n".join(rows)


def handed_over(log: str) -> dict[str, dict[str, Any]]:
    """Return the hand-overs that the decode worker has logged, by job."""
    found = {}
    for line in log.splitlines():
        if '"prefill.handed_over"' in line:
            event = json.loads(line[line.index("{") :])
            found[event["job"]] = event
    return found


def new_ones(deployment: Deployment, before: dict[str, dict[str, Any]], wanted: int) -> list[dict[str, Any]]:
    """Return the hand-overs since `before`; log lines take a moment to get here."""
    end = time.monotonic() + LOG_S
    while True:
        new = [event for job, event in handed_over(deployment.log).items() if job not in before]
        if len(new) >= wanted or time.monotonic() > end:
            return new
        time.sleep(0.1)


def ask(api: openai.OpenAI, model: str, length: int, rng: random.Random) -> float:
    """Seconds to the first token of a new prompt."""
    prompt = [rng.randrange(*VOCABULARY) for _ in range(length)]
    began = time.perf_counter()
    first = 0.0
    stream = api.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0, stream=True)
    for chunk in stream:
        if not first and chunk.choices:
            first = time.perf_counter() - began
    return first


def measure(deployment: Deployment, way: str, arguments: argparse.Namespace, ways: Ways, rng: random.Random) -> None:
    """Measure one way for one turn."""
    url = f"http://127.0.0.1:{deployment.port}/v1"
    with (
        Router(deployment, "kv", workers=1, metrics_port=arguments.port + 1, arguments=["--prefill", way]),
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as api,
    ):
        ask(api, deployment.model, max(LENGTHS), rng)
        for length in LENGTHS:
            before = handed_over(deployment.log)
            for _ in range(arguments.repeats):
                ways.first_s[way, length].append(ask(api, deployment.model, length, rng))
            wanted = arguments.repeats if way == "always" else 0
            new = new_ones(deployment, before, wanted)
            if way == "always":
                if len(new) != arguments.repeats:
                    why = [line for line in deployment.log.splitlines() if '"prefill.failed"' in line]
                    found = f"{len(new)} of {arguments.repeats} prompts of {length} tokens went the remote way"
                    raise SystemExit("\n".join([found, *why]))
                ways.parts[length] += new
            elif new:
                raise SystemExit(f"{len(new)} prompts went the remote way although they never should")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument("--port", type=int, default=18400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="requests per length and round")
    parser.add_argument("--up", action="append", default=[], help="further argument of `headrace up`; repeatable")
    arguments = parser.parse_args()
    extra = ["--mode", "disagg", "--log-level", "debug", "--log-format", "json", *arguments.up]
    if arguments.engine == "sim":
        extra += ["--engine-arg", "timing=cpu-small"]
    ways, rng = Ways(), random.Random(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(
            Path(folder), arguments.port, 1, engine=arguments.engine, arguments=extra, timeout_s=600, aggregated=False
        ) as deployment,
    ):
        deployment.until("peer.met")
        for _ in range(arguments.rounds):
            for way in ("always", "never"):
                measure(deployment, way, arguments, ways, rng)
    print(f"{arguments.engine}, 1 prefill and 1 decode worker, medians of {arguments.rounds * arguments.repeats}")
    print(ways.table())


if __name__ == "__main__":
    main()
