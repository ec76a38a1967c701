"""Compares the price of one fleet of a model with that of two at the same attainment, in virtual time with the real scheduler.

    .venv/bin/python -m benchmarks.fleets --trace mooncake.jsonl --rate 2
    .venv/bin/python -m benchmarks.fleets --trace AzureLLMInferenceTrace_code_2023.csv --rate 8 --limit 4000

A *single* worker has one accelerator and price 1, a *wide* one four of them and price 4: it computes prompts `--efficiency`
times four times as fast (the rest is what parallelism costs), and its steps take half the time. A part of the requests,
`--strict`, has the target `--ttft`, the others `--loose`. A deployment is good if the part `--attain` of each kind meets its
target. The cheapest good number of workers is searched for single workers alone, wide ones alone, and both as two fleets;
worker hours are the price of the workers times the duration of the replay. All have one queue and the same router.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import logging
import random
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import structlog

from headrace.tools.replay_bench.engine import EngineModel, ReplayFleet
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, Trace, TraceRequest, accelerate, chain_value, read_trace
from headrace.tools.replay_bench.world import ReplayOutcome, World

SINGLE = EngineModel(blocks=2_000, prefill_rate=8_000.0, base_s=0.016, decode_s=0.000_08)
WIDE_PRICE = 4.0


def wide_model(efficiency: float) -> EngineModel:
    """Four accelerators in one engine. `efficiency`: its prompts per second, over those of four engines."""
    rate = SINGLE.prefill_rate * WIDE_PRICE * efficiency
    return EngineModel(blocks=8_000, slots=256, prefill_rate=rate, base_s=0.008, decode_s=0.000_03)


MOST = 128  # single workers that are tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A deployment, and how its replay went."""

    single: int
    wide: int
    strict_met: float
    loose_met: float
    within_fifth: float  # part of the first tokens that were predicted to within a fifth of the truth
    seconds: float
    in_single: float  # part of the requests that went to single workers

    @property
    def price(self) -> float:
        return self.single + WIDE_PRICE * self.wide

    def told(self) -> dict[str, float]:
        return {**dataclasses.asdict(self), "price": self.price, "worker_hours": self.price * self.seconds / 3600.0}


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
            chain = tuple(chain_value(number * 4096 + block) for block in range(blocks))
            requests.append(TraceRequest(at_s=at, tokens=tokens, output=max(int(row["GeneratedTokens"]), 1), chain=chain))
    start_s = requests[0].at_s
    return Trace(str(path), tuple(dataclasses.replace(one, at_s=one.at_s - start_s) for one in requests))


def with_targets(trace: Trace, *, strict: float, ttft_s: float, loose_s: float) -> Trace:
    """Give every request one of two targets."""
    rng = random.Random("targets")
    return Trace(
        trace.name,
        tuple(dataclasses.replace(one, ttft_target_s=ttft_s if rng.random() < strict else loose_s) for one in trace.requests),
    )


class Search:
    """Replays deployments and remembers how they went."""

    def __init__(self, trace: Trace, *, ttft_s: float, attain: float, efficiency: float = 0.75) -> None:
        self._trace = trace
        self._wide = wide_model(efficiency)
        self._ttft_s = ttft_s
        self._attain = attain
        self._found: dict[tuple[int, int], Found] = {}

    def replay(self, single: int, wide: int) -> Found:
        """Replay one deployment, once."""
        if (single, wide) not in self._found:
            fleets = (
                ReplayFleet(name="single", price=1.0, workers=single, model=SINGLE),
                ReplayFleet(name="wide", price=WIDE_PRICE, workers=wide, model=self._wide),
            )
            settings = {"limits.hopeless": False, "limits.window": 1_000_000}
            policy = Policy(name="kv", settings=settings)
            outcomes = World(trace=self._trace, fleets=fleets, make_router=policy.router).run()
            self._found[single, wide] = self._judge(single, wide, outcomes)
        return self._found[single, wide]

    def _judge(self, single: int, wide: int, outcomes: Sequence[ReplayOutcome]) -> Found:
        kinds: dict[bool, list[bool]] = {True: [], False: []}
        close = []
        for one in outcomes:
            request = one.job.request
            target_s = request.ttft_target_s or 0.0
            ttft_s = one.job.first_s - request.at_s if one.job.first_s >= 0 else float("inf")
            kinds[target_s <= self._ttft_s].append(ttft_s <= target_s)
            close.append(abs(one.predicted_ttft_s - ttft_s) <= 0.2 * ttft_s)
        ends_s = max(one.job.end_s for one in outcomes)
        return Found(
            single=single,
            wide=wide,
            strict_met=_mean(kinds[True]),
            loose_met=_mean(kinds[False]),
            within_fifth=_mean(close),
            seconds=ends_s,
            in_single=_mean([one.job.worker < single for one in outcomes]),
        )

    def good(self, found: Found) -> bool:
        return found.strict_met >= self._attain and found.loose_met >= self._attain

    def least(self, make: Callable[[int], tuple[int, int]], most: int) -> Found | None:
        """Find the least good n by bisection, as more workers are never worse."""
        low, high = 0, most
        if not self.good(self.replay(*make(most))):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.good(self.replay(*make(middle))) else (middle, high)
        return self.replay(*make(high))


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, and print a line of JSON for each deployment found."""
    parser = argparse.ArgumentParser(description="One fleet of a model against two.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rate", type=float, default=1.0, help="times the trace's own speed")
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--loose", type=float, default=10.0)
    parser.add_argument("--strict", type=float, default=0.5)
    parser.add_argument("--efficiency", type=float, default=0.75, help="of a wide worker, over four single ones")
    parser.add_argument("--attain", type=float, default=0.95)
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    read = read_azure if chosen.trace.suffix == ".csv" else lambda path, limit: read_trace(path, limit=limit)
    trace = accelerate(read(chosen.trace, chosen.limit), chosen.rate)
    trace = with_targets(trace, strict=chosen.strict, ttft_s=chosen.ttft, loose_s=chosen.loose)
    search = Search(trace, ttft_s=chosen.ttft, attain=chosen.attain, efficiency=chosen.efficiency)
    one_kind = {
        "single": search.least(lambda n: (n, 0), MOST),
        "wide": search.least(lambda n: (0, n), MOST // 4),
    }
    for name, found in one_kind.items():
        print(json.dumps({"fleets": name, **(found.told() if found is not None else {"found": 0})}), flush=True)
    limits = [found.price for found in one_kind.values() if found is not None]
    best: Found | None = None
    for wide in range(1, int(min(limits, default=MOST) / WIDE_PRICE)):
        room = int(min([*limits, best.price if best is not None else MOST]) - WIDE_PRICE * wide) - 1
        if room < 1:
            break
        found = search.least(lambda n, wide=wide: (n, wide), room)  # type: ignore[misc]  # mypy takes it for a function of two
        if found is not None and (best is None or found.price < best.price):
            best = found
            print(json.dumps({"fleets": "both so far", **found.told()}), flush=True)
    print(json.dumps({"fleets": "both", **(best.told() if best is not None else {"found": 0})}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
