"""Measures the CPU by which a router knows, at any moment, the cached part of each waiting request on each worker.

    python -m benchmarks.cache_view [--workers 64] [--waiting 2048] [--rate 500] [--blocks 145] [--shared 40] [--looks 64]

A second of a busy pool, in virtual time and without NATS: requests come, wait, and are placed (mostly where their prefix is)
at `rate` a second, and each worker reports 100 engine steps a second with 0 to 20 blocks stored and as many removed.  Before
each placement the overlaps of `looks` waiting requests are read.  Printed is the CPU time of the calls into
`headrace.router.index.view.Caches` per second of virtual time, so 0.1 is a tenth of a core; what the clock itself takes
is subtracted.
For prompts of 100,000 tokens: `--blocks 6250 --shared 3000 --rate 10`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from headrace.router.index.view import Caches, create_index

STEPS_PER_S = 100
CACHED = 20_000  # blocks of a worker at the beginning, beside the beginnings of prompts


class Meter:
    """CPU time and calls by name."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        start = time.thread_time()
        for _ in range(10_000):
            time.thread_time()
        self._clock_s = (time.thread_time() - start) / 10_000

    def __call__(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        start = time.thread_time()
        result = method(*arguments, **named)
        spent = time.thread_time() - start - self._clock_s
        name = method.__name__
        self.spent_s[name] = self.spent_s.get(name, 0.0) + spent
        self.calls[name] = self.calls.get(name, 0) + 1
        return result


class Pool:
    """The workers and the requests, as far as the view is concerned."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        self.view = Caches(create_index(args.index, max_entries=args.max_entries))
        self.stems = [self.blocks(args.shared) for _ in range(args.families)]
        self.waiting: deque[tuple[str, list[int]]] = deque()
        self.held: dict[str, deque[int]] = {}
        self.pending: dict[str, deque[int]] = {}
        self.number = 0
        for n in range(args.workers):
            name = f"worker-{n}"
            self.view.add_worker(name)
            has = self.blocks(CACHED)
            for stem in self.rng.sample(self.stems, args.families // 4):
                has += stem[::-1]
            self.view.apply(name, removed={}, stored={"device": has}, now_s=0.0)
            self.held[name], self.pending[name] = deque(has), deque()
        for _ in range(args.waiting):
            self.view.track(*self.request())
        for request_id, _ in self.waiting:
            self.view.overlaps(request_id)

    def blocks(self, n: int) -> list[int]:
        return [self.rng.getrandbits(64) for _ in range(n)]

    def request(self) -> tuple[str, list[int]]:
        self.number += 1
        chain = self.rng.choice(self.stems) + self.blocks(self.args.blocks - self.args.shared)
        self.waiting.append((str(self.number), chain))
        return self.waiting[-1]

    def place(self, meter: Meter, now_s: float) -> None:
        for looked, _ in list(self.waiting)[: self.args.looks]:
            meter(self.view.overlaps, looked)
        request_id, chain = self.waiting.popleft()
        found = self.view.overlaps(request_id)
        worker = self.rng.choice(list(self.held))
        if found and self.rng.random() < 0.7:
            worker = max(found, key=lambda name: found[name].blocks)
        meter(self.view.verify, worker, chain)
        new = chain[found[worker].blocks if worker in found else 0 :]
        meter(self.view.untrack, request_id)
        meter(self.view.predict, worker, new, now_s=now_s)
        self.pending[worker].extend(new)

    def step(self, meter: Meter, worker: str, now_s: float) -> None:
        pending, held, n = self.pending[worker], self.held[worker], self.rng.randrange(21)
        stored = [pending.popleft() for _ in range(min(n, len(pending)))]
        stored += self.blocks(n - len(stored))  # of answers
        removed = [held.popleft() for _ in stored]
        held.extend(stored)
        meter(self.view.apply, worker, removed={"device": removed}, stored={"device": stored}, now_s=now_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=2_048)
    parser.add_argument("--rate", type=int, default=500, help="requests a second")
    parser.add_argument("--blocks", type=int, default=145, help="of a prompt")
    parser.add_argument("--shared", type=int, default=40, help="of them, with the family")
    parser.add_argument("--families", type=int, default=48)
    parser.add_argument("--looks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--index", choices=("auto", "compiled", "pure"), default="auto")
    parser.add_argument("--max-entries", type=int, default=20_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    pool, meter = Pool(args), Meter()
    steps = int(args.seconds * STEPS_PER_S)
    for step in range(steps):
        now_s = step / STEPS_PER_S
        for _ in range(args.rate * (step + 1) // STEPS_PER_S - args.rate * step // STEPS_PER_S):
            meter(pool.view.track, *pool.request())
            pool.place(meter, now_s)
        meter(pool.view.expire, now_s)
        for worker in pool.held:
            pool.step(meter, worker, now_s)
    total = sum(meter.spent_s.values())
    if args.json:
        print(
            json.dumps(
                {"conditions": vars(args), "cores": total / args.seconds, "spent_s": meter.spent_s, "calls": meter.calls}
            )
        )
        return
    print(f"{pool.view.index.implementation} index, {args.workers} workers, {args.waiting} waiting, {args.rate} requests/s,")
    print(f"prompts of {args.blocks} blocks ({args.shared} shared), {args.looks} overlaps read per placement")
    print("| call | calls/s | µs per call | cores |\n|---|---|---|---|")
    for name, spent in meter.spent_s.items():
        calls = meter.calls[name]
        print(f"| {name} | {calls / args.seconds:.0f} | {spent / calls * 1e6:.1f} | {spent / args.seconds:.4f} |")
    print(f"| all | | | {total / args.seconds:.4f} |")


if __name__ == "__main__":
    main()
