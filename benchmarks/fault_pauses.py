"""Measures what clients notice of a fault: the longest pause of every open stream, and the first tokens of new requests.

Each case starts its own `headrace up` with the simulator, opens the streams, waits until all of them have begun, hurts the
deployment, and asks new short requests from then on.  Every answer is compared with the simulator's own.  A pause is the
longest time between two chunks of a stream that ended after the fault began; without a fault it is a few steps.

    python -m benchmarks.fault_pauses --workers 3 --streams 60 --runs 2
    python -m benchmarks.fault_pauses --workers 6 --fault worker-killed --fault nats-stopped
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.deployment import Deployment
from benchmarks.fault_kinds import FAULTS, PROMPT_TOKENS, Fault, Running
from headrace.tools.chaos.client import Cut, StreamChecker, post, refusal
from headrace.tools.chaos.ledger import Outcome
from headrace.tools.chaos.questions import Question
from tests.support.machine_faults import Clock, small_disk_at

STEP_S = 0.05  # of the simulator, so that a stream of 300 tokens takes 15 s
NEW_REQUESTS = 10
NEW_EVERY_S = 0.2
NEW_TOKENS = 5
DEADLINE_S = 120.0
LONG_S = 5.0  # a pause that the promise of `docs/reliability.md` excludes
HELD_S = 0.25  # a stream that stood longer was hit: five steps


@dataclass(frozen=True, slots=True)
class Load:
    """The workers and streams of one run."""

    workers: int
    routers: int
    streams: int
    tokens: int


class Asked:
    """A request, and the times of its chunks on the monotonic clock."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.sent_s = time.monotonic()
        self.came_s: list[float] = []
        self.outcome = Outcome.OPEN
        self.detail = ""

    def pause_s(self, since_s: float) -> float:
        """Return the longest time between two chunks of which the later came after `since_s`; 0.0 if there is none."""
        return max(
            (late - early for early, late in zip(self.came_s, self.came_s[1:], strict=False) if late > since_s), default=0.0
        )

    async def run(self, port: int) -> None:
        """Ask, read the answer and compare it with the simulator's own."""
        headers = {"x-request-timeout-s": f"{DEADLINE_S:g}"}
        try:
            async with (
                asyncio.timeout(DEADLINE_S + 10.0),
                post("127.0.0.1", port, self.question.path, self.question.body("sim"), headers=headers) as response,
            ):
                if response.status != 200:
                    told = refusal(response.status, response.headers, await response.body())
                    self.outcome, self.detail = told.outcome, told.detail
                    return
                checker = StreamChecker(self.question)
                async for data in response.events():
                    if data == b"[DONE]":
                        self.outcome = checker.ended().outcome
                        return
                    if (broken := checker.feed(json.loads(data))) is not None:
                        self.outcome, self.detail = broken.outcome, broken.detail
                        return
                    self.came_s.append(time.monotonic())
                self.outcome, self.detail = Outcome.LOST, "no [DONE]"
        except Cut as error:
            self.outcome, self.detail = Outcome.CUT, str(error)
        except (OSError, TimeoutError) as error:
            self.outcome, self.detail = Outcome.UNREACHED, str(error)


@dataclass
class Noticed:
    """Effects of one fault on the clients of all its runs. Times in seconds."""

    pauses_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    details: list[str] = field(default_factory=list)

    def add(self, streams: list[Asked], fresh: list[Asked], since_s: float) -> None:
        """Count one run."""
        self.pauses_s += [asked.pause_s(since_s) for asked in streams]
        self.first_tokens_s += [asked.came_s[0] - asked.sent_s for asked in fresh if asked.came_s]
        self.refused += sum(asked.outcome is Outcome.REFUSED for asked in fresh)
        for asked in (*streams, *fresh):
            self.outcomes[asked.outcome.value] = self.outcomes.get(asked.outcome.value, 0) + 1
            if asked.outcome is not Outcome.ANSWERED:
                self.details.append(asked.detail)

    def row(self, title: str) -> str:
        """Return a row of the table."""
        hit = [pause for pause in self.pauses_s if pause > HELD_S]
        long = sum(pause > LONG_S for pause in hit)
        pauses = " | ".join(f"{percentile(hit, p):.2f}" if hit else "-" for p in (0.5, 0.99, 1.0))
        first = " | ".join(f"{percentile(self.first_tokens_s, p):.2f}" if self.first_tokens_s else "-" for p in (0.5, 1.0))
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return f"| {title} | {len(hit)} of {len(self.pauses_s)} | {pauses} | {long} | {first} | {self.refused} | {ends} |"


def percentile(values: list[float], p: float) -> float:
    """Return the nearest-rank percentile of some values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * p))]


def questions(rng: random.Random, count: int, tokens: int) -> list[Question]:
    """Draw requests with prompts of their own."""
    return [
        Question(number=n, prompt=tuple(rng.randint(200, 3000) for _ in range(PROMPT_TOKENS)), max_tokens=tokens, stream=True)
        for n in range(count)
    ]


async def measure(deployment: Deployment, load: Load, fault: Fault, seed: int, noticed: Noticed, clock: Clock | None) -> None:
    """Hurt one deployment under its load, and see all requests to their end."""
    rng = random.Random(seed)
    run = Running(deployment.data_dir, deployment.port, rng, clock)
    await asyncio.sleep(fault.age_s)
    async with asyncio.TaskGroup() as group:
        streams = [Asked(question) for question in questions(rng, load.streams, load.tokens)]
        for asked in streams:
            group.create_task(asked.run(deployment.port))
        async with asyncio.timeout(60.0):
            while not all(asked.came_s or asked.outcome is not Outcome.OPEN for asked in streams):
                await asyncio.sleep(0.02)
        since_s = time.monotonic()
        fresh: list[Asked] = []
        group.create_task(_ask_fresh(group, deployment.port, rng, fresh))
        await fault.inject(run)
    noticed.add(streams, fresh, since_s)


async def _ask_fresh(group: asyncio.TaskGroup, port: int, rng: random.Random, fresh: list[Asked]) -> None:
    for question in questions(rng, NEW_REQUESTS, NEW_TOKENS):
        await asyncio.sleep(NEW_EVERY_S)
        asked = Asked(question)
        fresh.append(asked)
        group.create_task(asked.run(port))


def run_fault(fault: Fault, load: Load, runs: int, port: int) -> Noticed:
    """Measure a fault on a fresh deployment per run."""
    noticed = Noticed()
    arguments = (
        "--engine-arg",
        f'timing_overrides={{"decode_base_s": {STEP_S}}}',
        "--engine-arg",
        "mean_output_tokens=0",
        *(word for argument in fault.engine for word in ("--engine-arg", argument)),
    )
    for seed in range(runs):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            place = Path(folder) / "data"
            if fault.disk_bytes:
                stack.enter_context(small_disk_at(place, fault.disk_bytes))
            else:
                place.mkdir()
            clock = Clock(Path(folder) / "clock") if fault.jumps else None
            deployment = stack.enter_context(
                Deployment(
                    place,
                    port,
                    load.workers,
                    routers=load.routers,
                    arguments=arguments,
                    environment=clock.environment if clock is not None else None,
                )
            )
            asyncio.run(measure(deployment, load, fault, seed, noticed, clock))
    return noticed


def main() -> None:
    """Measure the faults named on the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--port", type=int, default=18650)
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="all of them if none is named")
    parser.add_argument("--show-errors", action="store_true", help="print what requests that were not answered were told")
    arguments = parser.parse_args()
    load = Load(arguments.workers, arguments.routers, arguments.streams, arguments.tokens)
    print(
        f"{load.workers} workers, {load.routers} routers, {load.streams} streams of {load.tokens} tokens, {arguments.runs} runs"
    )
    print(
        f"| fault | streams that stood over {HELD_S} s | pause p50 s | p99 s | max s | over {LONG_S:g} s "
        "| first token of a new request p50 s | max s | new requests refused | ends |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in arguments.fault or list(FAULTS):
        noticed = run_fault(FAULTS[name], load, arguments.runs, arguments.port)
        print(noticed.row(FAULTS[name].title), flush=True)
        if arguments.show_errors:
            for detail in noticed.details:
                print(f"    {detail}", flush=True)


if __name__ == "__main__":
    main()
