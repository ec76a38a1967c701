"""Measures what a durable stream costs beside a plain one: events per second, CPU per event, bytes stored per token.

    python -m benchmarks.durable_streams [--streams 32] [--tokens 128] [--rounds 3] [--pace 0]

A nats-server, one frontend and one simulated worker run on this machine; the same completions are streamed plain and durable,
in turn. `--pace` is the engine's time per step in seconds; 0 makes tokens as fast as everything behind can take them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.tools.bench.serve import usage
from headrace.tools.chaos.client import post
from headrace.tools.chaos.deployment import MODEL, ChaosDeployment, DeploymentShape, until_well

WELL_S = 60.0
DURABLE = {"Headrace-Durable": "1"}


@dataclass(frozen=True, slots=True)
class Round:
    """A round of streams of one kind."""

    seconds: float
    events: int
    first_s: float  # median time to the first event
    cpu_s: float  # of server, frontend and worker


async def stream(deployment: ChaosDeployment, number: int, tokens: int, headers: dict[str, str]) -> tuple[int, float]:
    """Read one stream. Returns its events and the time to the first one."""
    address = deployment.frontends[0]
    body = {"model": MODEL, "prompt": [1000 + number % 1000, *range(300, 332)], "max_tokens": tokens, "stream": True}
    began = time.perf_counter()
    first_s, events = 0.0, 0
    async with post(address.host, address.port, "/v1/completions", body, headers=headers) as response:
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {(await response.body())[:300]!r}")
        async for data in response.events():
            if data == b"[DONE]":
                return events, first_s
            first_s = first_s or time.perf_counter() - began
            events += 1
    raise SystemExit(f"stream {number} ended after {events} events without [DONE]")


async def measure(deployment: ChaosDeployment, streams: int, tokens: int, number: int, headers: dict[str, str]) -> Round:
    """Read so many streams at once, whose prompts begin with `number` and those after it."""
    pids = [process.pid for process in deployment.processes] + [deployment.server.pid or 0]
    before = sum(usage(pid).cpu_s for pid in pids)
    began = time.perf_counter()
    found = await asyncio.gather(*(stream(deployment, number + i, tokens, headers) for i in range(streams)))
    seconds = time.perf_counter() - began
    cpu_s = sum(usage(pid).cpu_s for pid in pids) - before
    return Round(seconds, sum(events for events, _ in found), statistics.median(first for _, first in found), cpu_s)


def figures(rounds: list[Round]) -> dict[str, float]:
    """Return the medians of some rounds."""
    return {
        "events_per_s": round(statistics.median(r.events / r.seconds for r in rounds)),
        "cpu_us_per_event": round(statistics.median(r.cpu_s / r.events for r in rounds) * 1e6, 1),
        "first_event_ms": round(statistics.median(r.first_s for r in rounds) * 1000, 1),
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start a deployment and return the figures of both kinds. Raises SystemExit."""
    timing = "instant" if not args.pace else None
    engine = (f"timing={timing}",) if timing else (f'timing_overrides={{"decode_base_s": {args.pace}}}',)
    subjects = Subjects()
    with tempfile.TemporaryDirectory() as folder:
        shape = DeploymentShape(workers=1, routers=0, frontends=1, engine_arguments=engine)
        async with ChaosDeployment(Path(folder), shape) as deployment:
            options = ConnectOptions(servers=(deployment.server.url,))
            async with await Connection.connect(options, subjects=subjects) as connection:
                if not await until_well(deployment, connection, subjects, timeout_s=WELL_S):
                    raise SystemExit("the deployment is not ready in time")
                kinds: dict[str, dict[str, str]] = {"plain": {}, "durable": DURABLE}
                rounds: dict[str, list[Round]] = {name: [] for name in kinds}
                number = 0
                for turn in range(args.rounds + 1):  # the first one warms up
                    for name, headers in kinds.items():
                        done = await measure(deployment, args.streams, args.tokens, number, headers)
                        number += args.streams
                        if turn:
                            rounds[name].append(done)
                entries = await connection.subject_messages(subjects.stream("RSP"), f"{subjects.prefix}.rsp.>", limit=1_000_000)
    plain, durable = figures(rounds["plain"]), figures(rounds["durable"])
    made = (args.rounds + 1) * args.streams * args.tokens
    return {
        "streams": args.streams,
        "tokens": args.tokens,
        "plain": plain,
        "durable": durable,
        "rate_ratio": round(durable["events_per_s"] / plain["events_per_s"], 3),
        "stored_bytes_per_token": round(sum(len(entry.data) for entry in entries) / made, 1),
        "tokens_per_entry": round(made / max(1, len(entries)), 1),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="the engine's time per step")
    print(json.dumps(asyncio.run(run(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
