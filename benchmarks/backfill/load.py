"""Measures what batch requests cost interactive ones and how much idle capacity they use, in virtual time on simulated engines.

    .venv/bin/python -m benchmarks.backfill.load --workers 4 --load 0.6

Chats come at random at a part of the rate that the pool can bear, which is measured first.  They are served without and then
with a file of batch requests behind them; last comes a flood of chats beside the file.  Prompts of both kinds have lognormal
lengths and share nothing.  The capacity that chats leave is counted in two ways: the slots that they do not hold, over time,
and the batch tokens that the pool computes with nothing else to do, times the part of the load that is free.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import structlog

from benchmarks.backfill.world import Served, World
from benchmarks.disagg.node import Request
from headrace.broker.blocks import block_chain
from headrace.router.placement.settings import AdmissionSettings, FairnessSettings, SchedulerSettings
from headrace.workers.sim.settings import SimSettings

BLOCK = 64
VOCABULARY = 20_000
NEVER_S = 1e9


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a run. Times in seconds; the tokens are those of prompts and answers, each counted once."""

    name: str
    chats: int
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    batch_tokens_per_s: float
    chat_tokens_per_s: float
    idle_slots_used: float  # part of the slot seconds that chats leave, once the pool was filled
    idle_slots_used_at_all: float  # the same from the empty pool on
    preempted: int


def engine(slots: int) -> SimSettings:
    """8 B parameters on a GPU with 80 GB: room for 425,000 tokens."""
    return SimSettings(
        timing="h100-8b", block_size=BLOCK, blocks=425_000 // BLOCK, slots=slots, waiting=100_000, context_length=8192
    )


def chats(*, rate: float, seconds: float, seed: int = 1) -> list[Request]:
    """Make `rate` chats per second for so many seconds, as a Poisson process."""
    rng = random.Random(f"chats {seed}")
    requests: list[Request] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        requests.append(make_request(rng, at_s, "chat", mean_output=180))
    return requests


def file_of(lines: int, *, seed: int = 1) -> list[Request]:
    """Make a file of batch requests that share nothing."""
    rng = random.Random(f"file {seed}")
    return [make_request(rng, 0.0, "batch", mean_output=180) for _ in range(lines)]


def sorted_file(groups: int, lines: int, *, prefix: int, tail: int, output: int, seed: int = 1) -> list[Request]:
    """Make a file whose lines have common prefixes, those of one prefix next to each other."""
    rng = random.Random(f"sorted {seed}")
    requests = []
    for _ in range(groups):
        common = rng.choices(range(VOCABULARY), k=prefix)
        for _ in range(lines):
            tokens = common + rng.choices(range(VOCABULARY), k=tail)
            requests.append(Request(0.0, "batch", tokens, block_chain(tokens, BLOCK), output))
    return requests


def make_request(rng: random.Random, at_s: float, kind: str, *, mean_output: int) -> Request:
    """Make a request of random tokens."""
    length = int(min(2000, max(32, rng.lognormvariate(6.0, 0.7))))
    tokens = rng.choices(range(VOCABULARY), k=length)
    output = int(min(800, max(16, rng.expovariate(1 / mean_output))))
    return Request(at_s, kind, tokens, block_chain(tokens, BLOCK), output)


def settings(tuning: dict[str, float]) -> SchedulerSettings:
    """Make a router's settings: no chat is refused, however many wait."""
    fairness = {name: tuning.pop(name) for name in ("batch_share",) if name in tuning}
    return SchedulerSettings(
        limits=AdmissionSettings(window=1_000_000, tenant_share=1.0, class_share={}, hopeless=False),
        fairness=FairnessSettings(**fairness),
        **tuning,  # type: ignore[arg-type]
    )


def at(values: Sequence[float], part: float) -> float:
    """Return the value below which this part of all values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def measure(
    name: str,
    interactive: Sequence[Request],
    batch: Sequence[Request],
    *,
    workers: int,
    slots: int = 64,
    seconds: float,
    warm_s: float,
    tuning: dict[str, float] | None = None,
) -> Figures:
    """Serve for so many seconds. The first `warm_s`, in which the pool is filled, count for no time of chats and no slot."""
    world = World(interactive, batch, [engine(slots)] * workers, settings(dict(tuning or {})))
    warm: list[float] = []
    world.clock.at(warm_s, lambda: warm.extend((world.held_s(batch=False), world.held_s(batch=True))))
    world.run(seconds)
    if world.shed:
        raise RuntimeError(f"{world.shed} requests were refused")
    timed = [one for one in world.interactive if one.first_s >= 0 and one.request.at_s >= warm_s]
    ended = [one for one in timed if one.ended_s >= 0 and one.request.output > 1]
    chats_s, batch_s = (sum(one.held_s for one in served) for served in (world.interactive, world.batch))
    useful = sum(map(progress, world.batch))
    return Figures(
        name=name,
        chats=len(timed),
        ttft_p50=at([one.ttft_s for one in timed], 0.5),
        ttft_p99=at([one.ttft_s for one in timed], 0.99),
        itl_mean=sum((one.ended_s - one.first_s) / (one.request.output - 1) for one in ended) / max(len(ended), 1),
        batch_tokens_per_s=useful / seconds,
        chat_tokens_per_s=sum(map(progress, world.interactive)) / seconds,
        idle_slots_used=(batch_s - warm[1]) / (workers * slots * (seconds - warm_s) - (chats_s - warm[0])),
        idle_slots_used_at_all=batch_s / (workers * slots * seconds - chats_s),
        preempted=sum(one.preempted for one in world.batch),
    )


def answer(one: Served) -> int:
    """Count the tokens of the answer so far."""
    return len(one.run.choices[0].ids) if one.run is not None and one.run.choices else len(one.emitted)


def progress(one: Served) -> int:
    """Count the tokens that had to be computed for a request, as far as it has come, each once."""
    return len(one.request.tokens) + answer(one) if one.first_s >= 0 else 0


def main() -> int:
    """Run all four and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.6, help="part of the rate of chats that the pool can bear")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--tuning", type=json.loads, default={}, help="settings of the router, as JSON")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    workers, seconds = options.workers, options.seconds

    def run(name: str, interactive: Sequence[Request], batch: Sequence[Request], length_s: float = seconds) -> Figures:
        found = measure(name, interactive, batch, workers=workers, seconds=length_s, warm_s=10.0, tuning=options.tuning)
        print(json.dumps({key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(found).items()}))
        sys.stdout.flush()
        return found

    flood = chats(rate=150.0 * workers, seconds=30.0)
    most = run("chats alone, as many as can be", flood, [], 30.0)
    mean = sum(len(one.tokens) + one.output for one in flood) / len(flood)
    rate = options.load * most.chat_tokens_per_s / mean
    lines = file_of(int(100 * workers * seconds))
    offered = chats(rate=rate, seconds=seconds)
    alone = run("file alone", [], lines, 30.0)
    without = run(f"chats at {options.load:.0%}, {rate:.1f}/s", offered, [])
    beside = run("the same beside the file", offered, lines)
    full = run("flood of chats beside the file", flood, lines, 30.0)
    print(f"TTFT p50 x {beside.ttft_p50 / without.ttft_p50:.3f}, p99 x {beside.ttft_p99 / without.ttft_p99:.3f}")
    idle = (1 - options.load) * alone.batch_tokens_per_s
    slots = f"{beside.idle_slots_used:.1%} ({beside.idle_slots_used_at_all:.1%} from the empty pool on)"
    print(f"idle slots used {slots}, idle tokens used {beside.batch_tokens_per_s / idle:.1%}")
    share = full.batch_tokens_per_s / (full.batch_tokens_per_s + full.chat_tokens_per_s)
    print(f"share of the flooded pool {share:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
