"""Measures the placement decision of a router whose window is full.

A real scheduler over real caches, driven as fast as it goes: every arrival is followed by a decision, every placement by the
worker's `started`, a step's cache events, and in the end `settled` and a report, each followed by a decision too.  The workers
are figures, not processes: what is measured is the router's own code on one core.

    .venv/bin/python -m benchmarks.router_decisions --workers 8 --window 2048
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass

import structlog

from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.index.view import Caches, create_index
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import AdmissionSettings, SchedulerSettings
from headrace.router.placement.types import Placement, Waiting, WorkerInfo

SLOTS = 64
STEP_TOKENS = 8192


@dataclass(frozen=True)
class Cost:
    """Milliseconds of CPU; `cores_at_500` is the CPU that 500 requests/s take, `core_per_request` that of one request/s."""

    workers: int
    window: int
    prompt_tokens: int
    block_size: int
    requests: int
    decide_p50_ms: float
    decide_p95_ms: float
    decide_p99_ms: float
    decide_max_ms: float
    per_request_ms: float
    cores_at_500: float
    core_per_request: float


class Prompts:
    """Families with a shared prefix, each prompt with a tail of its own; all share the first block."""

    def __init__(self, rng: random.Random, blocks: int, families: int = 200) -> None:
        self._rng = rng
        self._blocks = blocks
        self._families = [[rng.getrandbits(64) for _ in range(blocks * 2 // 3)] for _ in range(families)]

    def next(self) -> list[int]:
        family = self._rng.choice(self._families)
        tail = [self._rng.getrandbits(64) for _ in range(self._blocks - len(family) - 1)]
        return [7, *family, *tail]


def measure(  # noqa: C901 - one scene, told in order
    *, workers: int, window: int, prompt_tokens: int, block_size: int, requests: int, seed: int = 0
) -> Cost:
    """Fill the slots and the window, then let one request arrive and one end, again and again."""
    rng = random.Random(seed)
    blocks = max(2, prompt_tokens // block_size)
    prompts = Prompts(rng, blocks)
    view = Caches(create_index())
    settings = SchedulerSettings(limits=AdmissionSettings(window=window + 1, class_share={}, tenant_share=1.0))
    scheduler = Scheduler(settings, view, name="bench")
    names = [f"w{n}" for n in range(workers)]
    for name in names:
        view.add_worker(name)
        info = WorkerInfo(worker=name, slots=SLOTS, blocks=0, block_size=block_size, step_tokens=STEP_TOKENS)
        scheduler.put_worker(info, 0.0)
    running: dict[str, deque[str]] = {name: deque() for name in names}
    cached: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in names}
    cache_blocks = blocks * 100
    clock = [0.0]
    decisions: list[float] = []
    reports = 0

    def report(name: str) -> None:
        nonlocal reports
        reports += 1
        scheduler.on_report(
            LoadReport(
                worker=name,
                epoch=1,
                n=reports,
                at=clock[0],
                slots=SLOTS,
                running=len(running[name]),
                waiting=0,
                step_s=0.02 + rng.random() * 1e-3,
                step_prefill_tokens=256,
                step_decodes=len(running[name]),
            ),
            clock[0],
        )

    def decide() -> None:
        began = time.thread_time()  # of this thread's CPU: on a shared machine the clock also counts what others do
        made = scheduler.decide(clock[0])
        decisions.append(time.thread_time() - began)
        for one in made:
            if isinstance(one, Placement):
                started(one)

    def started(placement: Placement) -> None:
        name, request_id = placement.worker, placement.request.id
        running[name].append(request_id)
        scheduler.on_event(JobEvent("started", request_id, 1, name, placement.request.tokens), clock[0])
        held, stored, gone = cached[name], [], []
        for block in reversed(placement.request.chain):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                stored.append(block)
        while len(held) > cache_blocks:
            gone.append(held.popitem(last=False)[0])
        view.apply(name, removed={"device": gone} if gone else {}, stored={"device": stored}, now_s=clock[0])
        report(name)
        scheduler.on_event(JobEvent("prefilled", request_id, 1, name, placement.request.tokens, placement.uncached), clock[0])

    def end_one() -> None:
        name = max(names, key=lambda each: len(running[each]))
        if running[name]:
            request_id = running[name].popleft()
            scheduler.on_event(JobEvent("settled", request_id, 1, name, 100), clock[0])
            report(name)

    def arrive(n: int) -> None:
        scheduler.offer(
            Waiting(
                id=str(n),
                tokens=prompt_tokens,
                chain=chains[n],
                block_size=block_size,
                tenant=f"t{n % 10}",
                arrived_s=clock[0],
            ),
            clock[0],
        )

    total = window + workers * SLOTS + requests
    chains = [prompts.next() for _ in range(total)]  # hashing is the ingress's work
    for name in names:
        report(name)
    n = 0
    while scheduler.waiting < window:  # fill the slots, then the window
        arrive(n)
        n += 1
        if n <= workers * SLOTS:
            decide()
    decisions.clear()
    began = time.process_time()
    first = n
    while n < total:
        clock[0] += 0.002
        arrive(n)
        decide()
        end_one()
        decide()
        n += 1
    per_request_s = (time.process_time() - began) / max(1, n - first)
    parts = statistics.quantiles(decisions, n=100)
    return Cost(
        workers=workers,
        window=window,
        prompt_tokens=prompt_tokens,
        block_size=block_size,
        requests=n - first,
        decide_p50_ms=round(statistics.median(decisions) * 1e3, 3),
        decide_p95_ms=round(parts[94] * 1e3, 3),
        decide_p99_ms=round(parts[98] * 1e3, 3),
        decide_max_ms=round(max(decisions) * 1e3, 3),
        per_request_ms=round(per_request_s * 1e3, 3),
        cores_at_500=round(per_request_s * 500, 3),
        core_per_request=round(per_request_s, 5),
    )


def main() -> int:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    done = [
        measure(workers=asked.workers, window=asked.window, prompt_tokens=2_320, block_size=16, requests=asked.requests),
        measure(workers=asked.workers, window=256, prompt_tokens=100_000, block_size=16, requests=max(1, asked.requests // 10)),
    ]
    if asked.json:
        json.dump([asdict(one) for one in done], sys.stdout, indent=2)
        print()
        return 0
    heads = ("workers", "window", "tokens", "p50 ms", "p95 ms", "p99 ms")
    print(*(f"{head:>7}" for head in heads), f"{'ms/request':>11}", f"{'cores at 500/s':>15}")
    for one in done:
        print(
            f"{one.workers:7} {one.window:7} {one.prompt_tokens:7} {one.decide_p50_ms:7.3f} {one.decide_p95_ms:7.3f} "
            f"{one.decide_p99_ms:7.3f} {one.per_request_ms:11.3f} {one.cores_at_500:15.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
