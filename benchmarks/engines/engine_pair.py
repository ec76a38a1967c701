"""A real engine through Headrace against the engine's own OpenAI server: the same settings, the same prompts, in turns.

    .venv/bin/python -m benchmarks.engines.engine_pair --engine vllm --model FOLDER --engine-arg dtype=bfloat16
    .venv/bin/python -m benchmarks.engines.engine_pair --engine sglang --model FOLDER --engine-arg dtype=bfloat16

Both are up during the whole run, and one works while the other waits: each round puts every workload to both, and the first of
one round is the second of the next. `headrace up` runs as users start it, with a router in the path and its default log. A
ratio is of one round; the medians and quartiles of all rounds are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.client import Outcome, Workload, run_workload
from benchmarks.deployment import Deployment
from benchmarks.engines.own_servers import ENGINES, START_S, own_server
from headrace.up.parts import choose_port

NAME = "small"
WORKLOADS = (
    Workload(streams=1, requests=6, tokens=16, model=NAME),
    Workload(streams=8, requests=24, tokens=32, model=NAME),
    Workload(streams=16, requests=32, tokens=64, model=NAME),
)
SETTLE_S = 0.5


def workload(text: str) -> Workload:
    """Read "8x24x32": streams, requests and tokens. Raises ValueError."""
    streams, requests, tokens = map(int, text.split("x"))
    return Workload(streams=streams, requests=requests, tokens=tokens, model=NAME)


def tokens_per_s(workload: Workload, outcome: Outcome) -> float:
    """Return tokens per second. All answers have all their tokens, as end-of-sequence tokens are ignored."""
    return outcome.ok * workload.tokens / outcome.seconds


def first_token_ms(outcome: Outcome) -> float:
    """Return the median over the requests of one round."""
    return outcome.percentile_ms("first_token_s", 0.5)


async def one(port: int, workload: Workload, first: int) -> Outcome:
    """Raises SystemExit if a request fails: a ratio of what was left would say nothing."""
    outcome = await run_workload("127.0.0.1", port, workload, first=first)
    if outcome.failed:
        raise SystemExit(f"{outcome.failed} of {workload.requests} requests failed: {outcome.errors[0]}")
    await asyncio.sleep(SETTLE_S)
    return outcome


async def measure(
    ports: Sequence[int], workloads: Sequence[Workload], rounds: int, *, until: float = math.inf
) -> dict[Workload, list[tuple[Outcome, Outcome]]]:
    """`ports`: of Headrace and of the engine's own server. Returns what both gave in each round, in this order.

    `until`: begin no round after this time of `time.monotonic`.
    """
    first = 0
    for workload in workloads:
        for port in ports:
            await one(port, workload, first)
        first += workload.requests
    found: dict[Workload, list[tuple[Outcome, Outcome]]] = {workload: [] for workload in workloads}
    for turn in range(rounds):
        if time.monotonic() > until:
            break
        for workload, pairs in found.items():
            if turn % 2:
                own = await one(ports[1], workload, first)
                ours = await one(ports[0], workload, first)
            else:
                ours = await one(ports[0], workload, first)
                own = await one(ports[1], workload, first)
            pairs.append((ours, own))
            first += workload.requests
            print(f"round {turn + 1}: {json.dumps(row(workload, pairs[-1:]))}", file=sys.stderr, flush=True)
    return found


def row(workload: Workload, pairs: list[tuple[Outcome, Outcome]]) -> dict[str, object]:
    """Return the medians of one workload; ratios and differences are of one round, Headrace to the engine's own server."""
    ratios = [tokens_per_s(workload, ours) / tokens_per_s(workload, own) for ours, own in pairs]
    added = [first_token_ms(ours) - first_token_ms(own) for ours, own in pairs]
    return {
        "streams": workload.streams,
        "tokens": workload.tokens,
        "rounds": len(pairs),
        "tokens_per_s": round(statistics.median(tokens_per_s(workload, ours) for ours, _ in pairs), 1),
        "own_tokens_per_s": round(statistics.median(tokens_per_s(workload, own) for _, own in pairs), 1),
        "ratio": _spread(ratios, 3),
        "ttft_ms": round(statistics.median(first_token_ms(ours) for ours, _ in pairs), 1),
        "own_ttft_ms": round(statistics.median(first_token_ms(own) for _, own in pairs), 1),
        "added_ttft_ms": _spread(added, 1),
    }


def _spread(values: list[float], digits: int) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) < 2:
        return [round(values[0], digits)] * 3
    return [round(value, digits) for value in statistics.quantiles(values, n=4, method="inclusive")]


def main() -> None:
    """Measure, and print a line of JSON for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME=VALUE", help="given to both")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--first", type=int, default=len(WORKLOADS), help="how many of the workloads, from the lightest on")
    parser.add_argument("--workload", action="append", type=workload, metavar="STREAMSxREQUESTSxTOKENS", help="in their place")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round after so many seconds")
    options = parser.parse_args()
    arguments = [part for arg in options.engine_arg for part in ("--engine-arg", arg)]
    ports = [choose_port("127.0.0.1", 0) for _ in range(2)]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        named = ("--model", options.model, "--served-name", NAME)
        deployment = Deployment(
            Path(folder),
            ports[0],
            workers=1,
            routers=1,
            engine=options.engine,
            arguments=[*named, *arguments],
            timeout_s=START_S,
            log_level="info",
        )
        log = Path(folder) / "own.log"
        with deployment, own_server(options.engine, options.model, ports[1], ["--served-name", NAME, *arguments], log):
            deployment.until("router.ready")
            workloads = options.workload or WORKLOADS[: options.first]
            found = uvloop.run(measure(ports, workloads, options.rounds, until=begun + options.seconds))
    for one_workload, pairs in found.items():
        if pairs:
            print(json.dumps(row(one_workload, pairs)))


if __name__ == "__main__":
    main()
