"""Measures a decision of the router of a very large pool while very much waits, in virtual time.

A real scheduler over real caches; the workers are figures that start, report, store blocks and end requests at the times that
their speed says. All requests are there from the start: the window takes as many as it holds, the others wait before it, as
they do in the stream. Measured is the processor time of the thread in each call of `decide`, and in what a router does around
it; a call that places several requests counts as so many decisions.

    .venv/bin/python -m benchmarks.large_pool                                # 1,000 workers, 100,000 waiting requests
    .venv/bin/python -m benchmarks.large_pool --workers 100 --window 512
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import resource
import statistics
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from benchmarks.virtual_clock import VirtualClock
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.index.view import Caches, create_index
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import AdmissionSettings, SchedulerSettings
from headrace.router.placement.types import Placement, Waiting, WorkerInfo

BLOCK_SIZE = 16
TOKENS = 512
FAMILIES, FAMILY_BLOCKS = 200, 20  # prompts that share their first blocks; all prompts share the very first one
CACHE_BLOCKS = 2_000  # of a worker: about 60 prompts
PREFILL_TOKENS_PER_S = 24_000.0
REPORT_S = 1.0
LEAST_ANSWER_S, MOST_ANSWER_S = 1.0, 5.0


class LargePool:
    """Workers as figures, and all that waits for them."""

    def __init__(self, *, workers: int, slots: int, window: int, waiting: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._clock = VirtualClock()
        self._view = Caches(create_index())
        limits = AdmissionSettings(window=window + 1, class_share={}, tenant_share=1.0)
        self._scheduler = Scheduler(SchedulerSettings(limits=limits), self._view, name="bench")
        self._window, self._slots = window, slots
        self._families = [[self._rng.getrandbits(64) for _ in range(FAMILY_BLOCKS)] for _ in range(FAMILIES)]
        self._before = deque(range(waiting))
        self._running: dict[str, set[str]] = {f"w{n}": set() for n in range(workers)}
        self._cached: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in self._running}
        self._reports = 0
        self.spent_s: dict[str, list[float]] = defaultdict(list)
        self.placed = 0
        for name in self._running:
            self._view.add_worker(name)
            info = WorkerInfo(worker=name, slots=slots, blocks=0, block_size=BLOCK_SIZE, step_tokens=8192)
            self._scheduler.put_worker(info, 0.0)
            self._report(name)
            self._clock.at(self._rng.random() * REPORT_S, self._heartbeat, name)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.thread_time()  # of this thread: on a shared machine the clock also counts what others do
        yield
        self.spent_s[what].append(time.thread_time() - began)

    def fill(self) -> None:
        """Let requests come, each with a decision, until all slots are taken and the window is full."""
        free = len(self._running) * self._slots
        while self._before and self._scheduler.waiting < self._window:
            self._offer()
            if self.placed < free:
                self._decide()

    def serve(self, placements: int) -> None:
        """Go on until so many more requests are placed."""
        last = self.placed + placements
        while self.placed < last and (self._before or self._scheduler.waiting):
            self._clock.jump()

    def _offer(self) -> None:
        n = self._before.popleft()
        tail = [self._rng.getrandbits(64) for _ in range(TOKENS // BLOCK_SIZE - FAMILY_BLOCKS - 1)]
        request = Waiting(
            id=str(n),
            tokens=TOKENS,
            chain=[7, *self._rng.choice(self._families), *tail],
            block_size=BLOCK_SIZE,
            tenant=f"t{n % 10}",
        )
        with self._timed("offer"):
            self._scheduler.offer(request, self._clock.now_s)

    def _decide(self) -> None:
        began = time.thread_time()
        made = self._scheduler.decide(self._clock.now_s)
        took_s = time.thread_time() - began
        self.spent_s["decide"].append(took_s)
        decisions = max(1, len(made))  # one without a placement is one, too: nothing that waits can go anywhere
        self.spent_s["decision"] += [took_s / decisions] * decisions
        with self._timed("next wake"):
            wake_s = self._scheduler.next_wake_s(self._clock.now_s)
        if wake_s is not None and len(made) > 1:
            self._clock.at(wake_s, self._decide)
        for one in made:
            if isinstance(one, Placement):
                self._start(one)

    def _start(self, placement: Placement) -> None:
        name, request_id, now_s = placement.worker, placement.request.id, self._clock.now_s
        self.placed += 1
        self._running[name].add(request_id)
        with self._timed("event"):
            self._scheduler.on_event(JobEvent("started", request_id, 1, name, placement.request.tokens), now_s)
        self._store(name, placement.request.chain)
        self._report(name)
        ends_s = now_s + placement.uncached / PREFILL_TOKENS_PER_S + self._rng.uniform(LEAST_ANSWER_S, MOST_ANSWER_S)
        self._clock.at(ends_s, self._end, name, request_id)

    def _store(self, name: str, chain: object) -> None:
        held, stored, gone = self._cached[name], [], []
        for block in chain:  # type: ignore[attr-defined]
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                stored.append(block)
        while len(held) > CACHE_BLOCKS:
            gone.append(held.popitem(last=False)[0])
        with self._timed("cache event"):
            self._view.apply(name, removed={"device": gone} if gone else {}, stored={"device": stored}, now_s=self._clock.now_s)

    def _end(self, name: str, request_id: str) -> None:
        self._running[name].discard(request_id)
        with self._timed("event"):
            self._scheduler.on_event(JobEvent("settled", request_id, 1, name, 100), self._clock.now_s)
        self._report(name)
        while self._before and self._scheduler.waiting < self._window:
            self._offer()
        self._decide()

    def _heartbeat(self, name: str) -> None:
        self._report(name)
        self._clock.at(self._clock.now_s + REPORT_S, self._heartbeat, name)

    def _report(self, name: str) -> None:
        self._reports += 1
        report = LoadReport(
            worker=name, epoch=1, n=self._reports, at=self._clock.now_s, slots=self._slots, running=len(self._running[name]),
            waiting=0, step_s=0.02 + self._rng.random() * 1e-3, step_prefill_tokens=256, step_decodes=len(self._running[name]),
        )  # fmt: skip
        with self._timed("report"):
            self._scheduler.on_report(report, self._clock.now_s)


def told(phase: str, pool: LargePool) -> dict[str, object]:
    """Describe one phase, in milliseconds of processor time, and forget its times."""
    row: dict[str, object] = {"phase": phase}
    for what, spent_s in pool.spent_s.items():
        parts = statistics.quantiles(spent_s, n=100) if len(spent_s) > 1 else [spent_s[0]] * 99
        row[what] = {
            "calls": len(spent_s),
            "p50_ms": round(parts[49] * 1e3, 3),
            "p99_ms": round(parts[98] * 1e3, 3),
            "max_ms": round(max(spent_s) * 1e3, 3),
        }
    pool.spent_s.clear()
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def main() -> None:
    """Print a line for each phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--placements", type=int, default=10_000, help="measured with the window full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2, help="times that so many are placed: caches fill, then they turn over")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    pool = LargePool(workers=asked.workers, slots=asked.slots, window=asked.window, waiting=asked.waiting, seed=asked.seed)
    pool.spent_s.clear()
    gc.collect()  # as the router does
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    pool.fill()
    sys.stdout.write(json.dumps(told("filling", pool)) + "\n")
    for turn in range(asked.rounds):
        pool.serve(asked.placements)
        sys.stdout.write(json.dumps(told(f"window full {turn + 1}", pool)) + "\n")


if __name__ == "__main__":
    main()
