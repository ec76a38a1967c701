"""Compares the price of one fleet of a model with that of two at the same attainment, in virtual time with the real scheduler.

    .venv/bin/python -m benchmarks.fleets --trace mooncake.jsonl --rate 4 --limit 1500
    .venv/bin/python -m benchmarks.fleets --trace AzureLLMInferenceTrace_code_2023.csv --rate 8 --kinds accelerators

Kinds of workers are those of `fleet_kinds.py`: one model on two, four or eight accelerators (`parallel`), or on accelerators of
four kinds (`accelerators`).  A part of the requests, `--strict`, is to have its first token within `--tight` times what the
quickest kind needs for the prompt that is longer than 95 % of them, the others within `--loose` times that.  A deployment is
good if the part `--attain` of each meets its target and none is refused.  The cheapest good number of workers is searched for
each kind alone, and then for pairs of kinds as two fleets; worker hours are the price of the workers times the duration of the
replay.  All have one queue and the same router, and each kind alone has all its requests served by one fleet.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import logging
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import structlog

from benchmarks.fleet_kinds import Kind, kinds_of
from headrace.tools.replay_bench.engine import ReplayFleet
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, Trace, TraceRequest, accelerate, chain_value, read_trace
from headrace.tools.replay_bench.world import ReplayOutcome, World

MOST = 128  # workers of one kind that are tried
BLOCK_STEP = 4096  # numbers of blocks from one prompt to the next
NO_PROMISE = 1e9
LONG = 95  # percentile of the prompts that the targets go by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A deployment, and how its replay went."""

    workers: dict[str, int]  # by kind
    price: float
    strict_met: float
    loose_met: float
    refused: int
    within_fifth: float  # part of the first tokens that were predicted to within a fifth of the truth
    seconds: float  # to the end of the last answer
    arriving_s: float  # to the last arrival
    share: dict[str, float]  # of the requests, by kind

    promised: bool = True  # what is predicted is kept

    @property
    def worker_hours(self) -> float:
        """To the end of the last answer: the replay is all there is."""
        return self.price * self.seconds / 3600.0

    @property
    def held_hours(self) -> float:
        """While requests came: the traffic goes on after it, as on any day."""
        return self.price * self.arriving_s / 3600.0

    def told(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "worker_hours": self.worker_hours, "held_hours": self.held_hours}


def read_azure(path: Path, limit: int | None) -> Trace:
    """Read a trace that says nothing of prefixes: no two prompts share any."""
    requests: list[TraceRequest] = []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if limit is not None and number >= limit:
                break
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            tokens = int(row["ContextTokens"])
            blocks = -(-tokens // BLOCK_TOKENS)
            chain = tuple(chain_value(number * BLOCK_STEP + block) for block in range(blocks))
            requests.append(TraceRequest(at_s=at, tokens=tokens, output=max(int(row["GeneratedTokens"]), 1), chain=chain))
    start_s = requests[0].at_s
    return Trace(str(path), tuple(dataclasses.replace(one, at_s=one.at_s - start_s) for one in requests))


def long_prompt(trace: Trace) -> float:
    """Return the tokens to be computed, by a cache that forgets nothing, of the prompt that is longer than 95 % of them."""
    seen: set[int] = set()
    uncached = []
    for one in trace.requests:
        known = next((n for n, value in enumerate(one.chain) if value not in seen), len(one.chain))
        seen.update(one.chain)
        uncached.append(max(one.tokens - known * BLOCK_TOKENS, 1))
    return float(np.percentile(uncached, LONG))


def with_targets(trace: Trace, *, strict: float, ttft_s: float, loose_s: float) -> Trace:
    """Give every request one of two targets."""
    rng = random.Random("targets")
    return Trace(
        trace.name,
        tuple(dataclasses.replace(one, ttft_target_s=ttft_s if rng.random() < strict else loose_s) for one in trace.requests),
    )


class Search:
    """Replays deployments of some kinds of workers and remembers how they went."""

    def __init__(self, trace: Trace, kinds: Sequence[Kind], *, ttft_s: float, attain: float) -> None:
        self._trace = trace
        self._kinds = tuple(kinds)
        self._ttft_s = ttft_s
        self._attain = attain
        self._found: dict[tuple[tuple[int, ...], bool], Found] = {}

    def replay(self, *numbers: int, promised: bool = True) -> Found:
        """Replay one deployment, once. `numbers`: of workers of each kind. `promised`: nothing makes a predicted time later."""
        if (numbers, promised) not in self._found:
            fleets = tuple(
                ReplayFleet(name=kind.name, price=kind.price, workers=number, model=kind.model)
                for kind, number in zip(self._kinds, numbers, strict=True)
                if number
            )
            settings: dict[str, object] = {"limits.hopeless": False, "limits.window": 1_000_000}
            if not promised:
                settings["promise"] = NO_PROMISE
            outcomes = World(trace=self._trace, fleets=fleets, make_router=Policy(name="kv", settings=settings).router).run()
            self._found[numbers, promised] = self._judge(numbers, outcomes, promised)
        return self._found[numbers, promised]

    def _judge(self, numbers: tuple[int, ...], outcomes: Sequence[ReplayOutcome], promised: bool) -> Found:
        names = [kind.name for kind, number in zip(self._kinds, numbers, strict=True) for _ in range(number)]
        met: dict[bool, list[bool]] = {True: [], False: []}
        close, where = [], Counter[str]()
        for one in outcomes:
            request = one.job.request
            target_s = request.ttft_target_s or 0.0
            ttft_s = one.job.first_s - request.at_s if one.job.first_s >= 0 else float("inf")
            met[target_s <= self._ttft_s].append(ttft_s <= target_s)
            if not one.shed:
                close.append(abs(one.predicted_ttft_s - ttft_s) <= 0.2 * ttft_s)
                where[names[one.job.worker]] += 1
        return Found(
            workers={kind.name: number for kind, number in zip(self._kinds, numbers, strict=True) if number},
            price=sum(kind.price * number for kind, number in zip(self._kinds, numbers, strict=True)),
            strict_met=_mean(met[True]),
            loose_met=_mean(met[False]),
            refused=sum(bool(one.shed) for one in outcomes),
            within_fifth=_mean(close),
            seconds=max(one.job.end_s for one in outcomes),
            arriving_s=self._trace.requests[-1].at_s,
            promised=promised,
            share={name: round(count / len(outcomes), 3) for name, count in where.items()},
        )

    def good(self, found: Found) -> bool:
        return found.strict_met >= self._attain and found.loose_met >= self._attain and not found.refused

    def alone(self, kind: int, most: int = MOST) -> Found | None:
        """Find the least good number of workers of one kind: with promises, or without where those are fewer."""

        def make(n: int) -> tuple[int, ...]:
            return tuple(n if at == kind else 0 for at in range(len(self._kinds)))

        kept = self.least(make, most)
        free = self.least(make, most if kept is None else kept.workers[self._kinds[kind].name] - 1, promised=False)
        return free or kept

    def pair(self, first: int, second: int, below: float) -> Found | None:
        """Find the cheapest good deployment of two kinds, each with a worker, whose price is below this."""
        best: Found | None = None
        one, other = self._kinds[first], self._kinds[second]
        number = 1
        while (room := below - number * one.price) > other.price:
            fixed = number
            found = self.least(
                lambda n: tuple(fixed if at == first else n if at == second else 0 for at in range(len(self._kinds))),  # noqa: B023
                min(math.ceil(room / other.price) - 1, MOST),
            )
            if found is not None:
                best, below = found, found.price
            number += 1
        return best

    def least(self, make: Callable[[int], tuple[int, ...]], most: int, *, promised: bool = True) -> Found | None:
        """Find the least good n by bisection, as more workers are never worse."""
        low, high = 0, most
        if most < 1 or not self.good(self.replay(*make(most), promised=promised)):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.good(self.replay(*make(middle), promised=promised)) else (middle, high)
        return self.replay(*make(high), promised=promised)


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 1.0


def _tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, and print a line of JSON for each deployment found, then what the best pair saves."""
    parser = argparse.ArgumentParser(description="One fleet of a model against two.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rate", type=float, default=1.0, help="times the trace's own speed")
    parser.add_argument("--kinds", choices=("parallel", "accelerators"), default="parallel")
    parser.add_argument("--pairs", help="only these pairs of kinds: tp8+tp2,tp4+tp2")
    parser.add_argument("--tight", type=float, default=2.0, help="target of strict requests, in times of a long prompt")
    parser.add_argument("--loose", type=float, default=10.0, help="target of the others, likewise")
    parser.add_argument("--strict", type=float, default=0.5)
    parser.add_argument("--attain", type=float, default=0.95)
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    read = read_azure if chosen.trace.suffix == ".csv" else lambda path, limit: read_trace(path, limit=limit)
    trace = accelerate(read(chosen.trace, chosen.limit), chosen.rate)
    kinds = kinds_of(chosen.kinds)
    unit_s = long_prompt(trace) / max(kind.model.prefill_rate for kind in kinds)
    targets_s = {"ttft_s": round(chosen.tight * unit_s, 3), "loose_s": round(chosen.loose * unit_s, 3)}
    _tell(**targets_s)
    trace = with_targets(trace, strict=chosen.strict, **targets_s)
    search = Search(trace, kinds, ttft_s=targets_s["ttft_s"], attain=chosen.attain)
    alone = {kind.name: search.alone(number) for number, kind in enumerate(kinds)}
    for name, found in alone.items():
        _tell(alone=name, **(found.told() if found is not None else {"found": 0}))
    one = min((found for found in alone.values() if found is not None), key=lambda found: found.price, default=None)
    two: Found | None = None
    for first, second in itertools.combinations(sorted(range(len(kinds)), key=lambda n: -kinds[n].price), 2):
        name = f"{kinds[first].name}+{kinds[second].name}"
        if chosen.pairs and name not in chosen.pairs.split(","):
            continue
        limits = [found.price for found in (one, two) if found is not None]
        found = search.pair(first, second, min(limits, default=MOST * kinds[first].price))
        _tell(pair=name, **(found.told() if found is not None else {"found": 0}))
        two = found or two
    if one is not None and two is not None:
        _tell(
            saved_of_price=1 - two.price / one.price,
            saved_of_worker_hours=1 - two.worker_hours / one.worker_hours,
            saved_of_held_hours=1 - two.held_hours / one.held_hours,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
