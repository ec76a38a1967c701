"""The prefix index against itself without compilation and against the Rust radix tree of `ai-dynamo-runtime`.

    python -m benchmarks.prefix_index [--rounds 5] [--requests 8000] [--memory 1000000,10000000] [--json]

All get the same prompts, as lists of int, in families that share their beginnings, and each prompt on one random worker.  The
subjects take turns within a round, in another order in each, and ratios are taken within a round, so that whatever else the
machine does meets all of them alike; what is printed are medians over the rounds.  Before anything is timed, the subjects
have to agree on sampled lookups.  The radix tree gets its events as JSON, encoded beforehand, because its binding takes
nothing else.  Our lookups gallop; the exact ones look at every block.  Removed is, of a quarter of the prompts, what they share
with no other, last block first.

Memory is measured in a process of its own for each figure: growth of the resident set while the blocks, made on the way and not
kept, are stored on 16 workers.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from headrace.router.index.types import BlockTable, Tier
from headrace.router.index.view import create_index

NOT_INSTALLED = "RadixTree is left out: the module `dynamo` (package ai-dynamo-runtime) is not installed here."
NOT_BUILT = "The compiled index is left out: it was not built here (no C compiler?)."
LOOKUPS = 2_000
PASSES = 5  # over the lookups, of which the fastest counts: the others were disturbed


class Subject(Protocol):
    """An index under test."""

    def feed(self, worker: int, chain: Sequence[int]) -> Any:
        """Return the input of `store`, made before the clock runs."""

    def store(self, worker: int, fed: Any) -> None: ...
    def feed_removal(self, worker: int, chain: Sequence[int]) -> Any: ...
    def remove(self, worker: int, fed: Any) -> None: ...
    def lookup(self, chain: Sequence[int]) -> Any: ...
    def drop(self, worker: int) -> None: ...
    def answer(self, chain: Sequence[int]) -> dict[int, int]:
        """Blocks per worker, to compare."""

    def settle(self) -> None:
        """Everything asked for so far has happened."""


class Ours:
    """An index of this repository."""

    def __init__(self, implementation: str, workers: int) -> None:
        self.index: BlockTable = create_index(implementation)  # type: ignore[arg-type]
        self.names = [f"worker-{n}" for n in range(workers)]
        self.lookup = self.index.match
        for name in self.names:
            self.index.add_worker(name)

    def feed(self, worker: int, chain: Sequence[int]) -> Sequence[int]:
        return chain

    feed_removal = feed

    def store(self, worker: int, fed: Sequence[int], tier: Tier = "device") -> None:
        self.index.store(self.names[worker], tier, fed)

    def remove(self, worker: int, fed: Sequence[int], tier: Tier = "device") -> None:
        self.index.remove(self.names[worker], tier, fed)

    def drop(self, worker: int) -> None:
        self.index.drop_worker(self.names[worker])

    def answer(self, chain: Sequence[int]) -> dict[int, int]:
        return {self.names.index(name): overlap.device for name, overlap in self.index.match(chain).items()}

    def settle(self) -> None:
        pass


class Radix:
    """The binding of the radix tree. It hands each call to a thread of its own."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree

        self.tree = RadixTree()
        self.events = 0
        self.lookup = self.tree.find_matches

    def _event(self, data: dict[str, Any]) -> bytes:
        self.events += 1
        return json.dumps({"event_id": self.events, "dp_rank": 0, "data": data}).encode()

    def feed(self, worker: int, chain: Sequence[int]) -> bytes:
        blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
        return self._event({"stored": {"parent_hash": None, "blocks": blocks}})

    def feed_removal(self, worker: int, chain: Sequence[int]) -> bytes:
        return self._event({"removed": {"block_hashes": list(chain)}})

    def store(self, worker: int, fed: bytes) -> None:
        self.tree.apply_event(worker, fed)

    remove = store

    def drop(self, worker: int) -> None:
        self.tree.remove_worker(worker)

    def answer(self, chain: Sequence[int]) -> dict[int, int]:
        return {worker: blocks for (worker, _), blocks in self.tree.find_matches(list(chain)).scores.items()}

    def settle(self) -> None:
        self.tree.find_matches([1])


@dataclass(frozen=True)
class Load:
    """Prompts with the worker of each, what of some of them is removed, and what is looked up."""

    chains: list[list[int]]
    removals: list[list[int]]
    place: list[int]
    lookups: dict[str, list[list[int]]]


def make_load(args: argparse.Namespace) -> Load:
    """From the seed alone."""
    rng = random.Random(args.seed)

    def blocks(n: int) -> list[int]:
        return [rng.getrandbits(64) for _ in range(n)]

    stems = [blocks(args.shared) for _ in range(args.families)]
    chains = [stems[n % args.families] + blocks(args.blocks - args.shared) for n in range(args.requests)]
    known = [rng.choice(chains) for _ in range(LOOKUPS)]
    lookups = {
        "hit all": known,
        "hit half": [chain[: args.blocks // 2] + blocks(args.blocks - args.blocks // 2) for chain in known],
        "miss": [blocks(args.blocks) for _ in range(LOOKUPS)],
    }
    removals = [chain[args.shared :][::-1] for chain in chains[: len(chains) // 4]]
    return Load(chains, removals, [rng.randrange(args.workers) for _ in chains], lookups)


def timed(subject: Subject, step: Callable[[], object]) -> float:
    """Seconds, with what the subject does in the background."""
    subject.settle()
    start = time.perf_counter()
    step()
    subject.settle()
    return time.perf_counter() - start


def measure(subject: Subject, load: Load) -> dict[str, float]:
    """Measure one round of one subject. Returns figure → value; million blocks/s, or µs or ms."""
    chains, place = load.chains, load.place
    total, figures = sum(map(len, chains)), {}

    def run(method: Callable[[int, Any], None], fed: list[Any], where: Sequence[int]) -> float:
        return timed(subject, lambda: [method(worker, each) for worker, each in zip(where, fed, strict=True)])

    fed = [subject.feed(worker, chain) for worker, chain in zip(place, chains, strict=True)]
    figures["store (M blocks/s)"] = total / run(subject.store, fed, place) / 1e6
    for name, asked in load.lookups.items():
        lookup = subject.lookup
        passes = [timed(subject, lambda: [lookup(each) for each in asked]) for _ in range(PASSES)]  # noqa: B023
        figures[f"lookup, {name} (us)"] = min(passes) / len(asked) * 1e6
    some = len(chains) // 4
    if isinstance(subject, Ours):
        for name, asked in load.lookups.items():
            exact = subject.index.match_exact
            passes = [timed(subject, lambda: [exact(each) for each in asked]) for _ in range(PASSES)]  # noqa: B023
            figures[f"exact lookup, {name} (us)"] = min(passes) / len(asked) * 1e6
        spent = run(lambda worker, each: subject.store(worker, each, "host"), fed[-some:], place[-some:])
        spent += run(subject.remove, fed[-some:], place[-some:])
        figures["tier move (M blocks/s)"] = sum(map(len, chains[-some:])) / spent / 1e6
    removed = [subject.feed_removal(worker, blocks) for worker, blocks in zip(place[:some], load.removals, strict=True)]
    figures["remove (M blocks/s)"] = sum(map(len, load.removals)) / run(subject.remove, removed, place[:some]) / 1e6
    figures["drop a worker (ms)"] = timed(subject, lambda: subject.drop(0)) * 1e3
    return figures


def check(subjects: dict[str, Subject], load: Load) -> None:
    """Raises SystemExit when two disagree."""
    first, *others = subjects.values()
    for subject in subjects.values():
        for worker, chain in zip(load.place[:500], load.chains[:500], strict=True):
            subject.store(worker, subject.feed(worker, chain))
    for chain in [*load.chains[:100], *load.lookups["hit half"][:100], *load.lookups["miss"][:10]]:
        if any(other.answer(chain) != first.answer(chain) for other in others):
            raise SystemExit(f"the subjects disagree on a chain that begins with {chain[0]}")


def names() -> Iterator[str]:
    """Return the subjects that there are here."""
    yield "pure"
    if importlib.util.find_spec("headrace.router.index._blocks"):
        yield "compiled"
    if importlib.util.find_spec("dynamo"):
        yield "radix"


def build(name: str, workers: int) -> Subject:
    """Create an empty index."""
    return Radix() if name == "radix" else Ours(name, workers)


def resident() -> int:
    """Bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(name: str, blocks: int) -> None:
    """In a process of its own: print the bytes per block."""
    rng, subject = random.Random(1), build(name, 16)
    subject.store(0, subject.feed(0, [1]))
    subject.settle()
    gc.collect()
    before = resident()
    for n in range(blocks // 100):
        subject.store(n % 16, subject.feed(n % 16, array("Q", rng.randbytes(800))))
    subject.settle()
    gc.collect()
    print((resident() - before) / (blocks // 100 * 100))


def memory(name: str, blocks: int) -> float:
    """Bytes per block."""
    command = [sys.executable, "-m", "benchmarks.prefix_index", "--fill", name, "--memory", str(blocks)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8_000)
    parser.add_argument("--blocks", type=int, default=145, help="of a prompt")
    parser.add_argument("--shared", type=int, default=40, help="of them, with the family")
    parser.add_argument("--families", type=int, default=200)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--memory", default="1000000", help="index sizes to measure memory at, comma between; empty = none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if args.fill:
        fill(args.fill, int(args.memory))
        return
    load, who = make_load(args), list(names())
    check({name: build(name, args.workers) for name in who}, load)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in who}
    gc.collect()
    gc.freeze()  # the load's millions of ints are no cost of the index
    for turn in range(args.rounds):
        for name in [*who[turn % len(who) :], *who[: turn % len(who)]]:
            rounds[name].append(measure(build(name, args.workers), load))
            gc.collect()
    sizes = [int(size) for size in args.memory.split(",") if size]
    report(args, rounds, {size: {name: memory(name, size) for name in who} for size in sizes})


def report(args: argparse.Namespace, rounds: dict[str, list[dict[str, float]]], sizes: dict[int, dict[str, float]]) -> None:
    """Print the table, or all of it as JSON."""
    figures = list(rounds["pure"][0])
    table = {
        figure: {
            name: statistics.median(each[figure] for each in taken) for name, taken in rounds.items() if figure in taken[0]
        }
        for figure in figures
    }
    ratios: dict[str, dict[str, float]] = {}  # how many times faster, within a round
    for figure in figures:
        for fast, slow in (("compiled", "pure"), ("compiled", "radix"), ("pure", "radix")):
            if fast in table[figure] and slow in table[figure]:
                pairs = [(a[figure], b[figure]) for a, b in zip(rounds[fast], rounds[slow], strict=True)]
                times = statistics.median(a / b if "blocks/s" in figure else b / a for a, b in pairs)
                ratios.setdefault(figure, {})[f"{fast} : {slow}"] = times
    for size, taken in sizes.items():
        table[f"memory at {size:,} blocks (bytes/block)"] = taken
    if args.json:
        conditions = {**vars(args), "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"conditions": conditions, "medians": table, "times_faster": ratios, "rounds": rounds}, indent=2))
        return
    columns = list(rounds)
    pairs_shown = list(dict.fromkeys(pair for each in ratios.values() for pair in each))
    print(f"{args.requests} prompts of {args.blocks} blocks, {args.shared} of them shared in {args.families} families,")
    print(f"on {args.workers} workers; medians of {args.rounds} rounds; Python {platform.python_version()}")
    print(f"| | {' | '.join([*columns, *pairs_shown])} |\n|---|{'---|' * (len(columns) + len(pairs_shown))}")
    for figure, values in table.items():
        cells = [f"{values[name]:.4g}" if name in values else "" for name in columns]
        cells += [f"{each:.1f} ×" if (each := ratios.get(figure, {}).get(pair)) else "" for pair in pairs_shown]
        print(f"| {figure} | {' | '.join(cells)} |")
    for name, message in (("compiled", NOT_BUILT), ("radix", NOT_INSTALLED)):
        if name not in columns:
            print(message)


if __name__ == "__main__":
    main()
