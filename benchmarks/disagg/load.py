"""Prefill and decode apart against together, in virtual time on simulated engines (`benchmarks/disagg/world.py`).

The workload is a mix: chats (short prompts, long answers), and long prompts whose lengths, answers and shared prefixes are
those of a published trace; both come at random.  A request is *good* if its first token comes within `--ttft` seconds
and 99 % of its other tokens at most `--itl` milliseconds after the one before; the router is told the latter.

    .venv/bin/python -m benchmarks.disagg.load --workers 4
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import structlog

from benchmarks.disagg.node import Request, Served
from benchmarks.disagg.world import World
from headrace.broker.blocks import block_chain
from headrace.router.placement.settings import AdmissionSettings, PrefillMode, SchedulerSettings
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, SAMPLE, read_trace
from headrace.workers.engine import Role
from headrace.workers.sim.settings import SimSettings

BLOCK = 64
LONGEST = 32_000
VOCABULARY = 20_000
Transfer = Literal["pull", "push"]
MODES: tuple[PrefillMode, ...] = ("never", "always", "auto")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A limit of the time to the first token, and of that between two tokens in 99 % of the cases, for a request to be good."""

    ttft_s: float
    itl_s: float

    def met(self, one: Served) -> bool:
        """By a request that has been served to its end."""
        gaps = one.gaps
        if one.first_s < 0 or len(gaps) < one.request.output - 1 or one.ttft_s > self.ttft_s:
            return False
        return at(gaps, 0.99) <= self.itl_s


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a run. Times in seconds; `itl`: between tokens of all requests together, `chat_itl`: of chats."""

    pool: str
    mode: str
    rate: float
    requests: int
    itl_goal: float
    good: float  # part of all
    goodput_per_s: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    chat_itl_p99: float
    tpot_p90: float
    remote: float  # part of all
    reasons: dict[str, int]
    fell_back: int
    shed: int
    cpu_s: float


def workload(*, rate: float, seconds: float, long_share: float, seed: int) -> list[Request]:
    """`rate` requests per second for so many seconds, as a Poisson process."""
    rng = random.Random(f"disaggregation {seed}")
    long = [r for r in read_trace(SAMPLE).requests if r.tokens <= LONGEST]
    requests: list[Request] = []
    at_s, nth = 0.0, 0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        if rng.random() < long_share:
            one = long[nth % len(long)]
            nth += 1
            ids = [value + nth // len(long) for value in one.chain]  # another round is of other documents
            tokens = [token for value in ids for token in _block_tokens(value)][: one.tokens]
            requests.append(_request(at_s, "long", tokens, min(one.output, 600)))
        else:
            length = int(min(2000, max(32, rng.lognormvariate(6.0, 0.7))))
            tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
            requests.append(_request(at_s, "chat", tokens, int(min(800, max(16, rng.lognormvariate(5.3, 0.6))))))
    return requests


def _block_tokens(value: int) -> list[int]:
    """Return tokens for a block of a trace: any, but always the same."""
    return [(value + 7919 * n) % VOCABULARY for n in range(BLOCK_TOKENS)]


def _request(at_s: float, kind: str, tokens: list[int], output: int) -> Request:
    return Request(at_s, kind, tokens, block_chain(tokens, BLOCK), max(output, 2))


def engine(step_tokens: int, transfer: Transfer) -> SimSettings:
    """8 B parameters on a GPU with 80 GB: room for 425,000 tokens."""
    return SimSettings(
        timing="h100-8b",
        block_size=BLOCK,
        blocks=425_000 // BLOCK,
        slots=128,
        step_tokens=step_tokens,
        context_length=LONGEST + 2000,
        lease_s=600.0,
        transfer_mode=transfer,
        fabric="local",
    )


@dataclass(frozen=True, kw_only=True)
class Pool:
    """`prefill` workers and `decode` ones; without the former, aggregated ones. `step_tokens` of those that decode."""

    prefill: int
    decode: int
    step_tokens: int
    prefill_step_tokens: int = 2048
    transfer: Transfer = "push"

    @property
    def label(self) -> str:
        name = f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} aggregated"
        return f"{name}, {self.step_tokens}"

    def nodes(self) -> list[tuple[Role, SimSettings]]:
        """Roles and engine settings of all workers."""
        if not self.prefill:
            return [(Role.AGGREGATED, engine(self.step_tokens, self.transfer))] * self.decode
        prefill = engine(self.prefill_step_tokens, self.transfer)
        return [(Role.PREFILL, prefill)] * self.prefill + [(Role.DECODE, engine(self.step_tokens, self.transfer))] * self.decode


def settings(mode: PrefillMode, goal: Goal, tuning: dict[str, float]) -> SchedulerSettings:
    """Return a router's settings that know the goal and refuse nothing: what comes too late counts as late."""
    limits = AdmissionSettings(window=1_000_000, class_share={}, tenant_share=1.0, hopeless=False)
    return SchedulerSettings(prefill=mode, limits=limits, **{"prefill_itl_s": goal.itl_s, **tuning})  # type: ignore[arg-type]  # floats by name


def measure(
    requests: Sequence[Request], pool: Pool, mode: PrefillMode, goal: Goal, *, rate: float, tuning: dict[str, float]
) -> Figures:
    """Replay it all and count."""
    began = time.process_time()
    world = World(requests, pool.nodes(), settings(mode, goal, tuning))
    served = world.run(until_s=requests[-1].at_s + 120.0)
    first = [one.ttft_s if one.first_s >= 0 else float("inf") for one in served]
    gaps = [gap for one in served for gap in one.gaps]
    chats = [gap for one in served if one.request.kind == "chat" for gap in one.gaps]
    means = [sum(one.gaps) / len(one.gaps) for one in served if one.gaps]
    good = sum(goal.met(one) for one in served)
    decisions = [one.prefill for one in served if one.prefill is not None]
    reasons = Counter(f"{'remote' if one.remote else 'local'}/{one.reason}" for one in decisions)
    return Figures(
        pool=pool.label,
        mode=mode if pool.prefill else "-",
        rate=rate,
        requests=len(served),
        itl_goal=goal.itl_s,
        good=good / len(served),
        goodput_per_s=good / requests[-1].at_s,
        ttft_p50=at(first, 0.5),
        ttft_p90=at(first, 0.9),
        ttft_p99=at(first, 0.99),
        itl_p50=at(gaps, 0.5),
        itl_p99=at(gaps, 0.99),
        chat_itl_p99=at(chats, 0.99),
        tpot_p90=at(means, 0.9),
        remote=sum(one.remote for one in decisions) / len(served),
        reasons=dict(reasons.most_common()),
        fell_back=sum(one.fell_back for one in served),
        shed=world.shed,
        cpu_s=time.process_time() - began,
    )


def at(values: Sequence[float], part: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


HEAD = (
    f"{'pool, step tokens':20} {'mode':>7} {'req/s':>6} {'good':>6} {'good/s':>7} {'TTFT p50':>8} {'p90':>7} {'p99':>7} "
    f"{'ITL p50':>8} {'p99 ms':>7} {'chats':>7} {'TPOT p90':>8} {'remote':>7}  reasons"
)


def show(one: Figures) -> None:
    """Print one line."""
    reasons = " ".join(f"{name}:{count}" for name, count in one.reasons.items())
    print(
        f"{one.pool:20} {one.mode:>7} {one.rate:6.1f} {one.good:6.1%} {one.goodput_per_s:7.2f} {one.ttft_p50:8.3f} "
        f"{one.ttft_p90:7.3f} {one.ttft_p99:7.2f} {one.itl_p50 * 1e3:8.1f} {one.itl_p99 * 1e3:7.1f} "
        f"{one.chat_itl_p99 * 1e3:7.1f} {one.tpot_p90 * 1e3:8.1f} {one.remote:7.1%}  {reasons}",
        flush=True,
    )


def conclude(done: Sequence[Figures]) -> None:
    """Per rate the best pools, and where `auto` was not as good as the better of the other modes."""
    for rate in sorted({one.rate for one in done}):
        here = [one for one in done if one.rate == rate]
        together = max((one for one in here if one.mode == "-"), key=lambda one: one.good)
        print(f"{rate:g} req/s: aggregated {together.good:.1%} good ({together.pool})", end="")
        apart = max((one for one in here if one.mode == "auto"), key=lambda one: one.good, default=None)
        print(f"; apart {apart.good:.1%} ({apart.pool}, auto)" if apart is not None else "")
    for one in done:
        others = [other for other in done if (other.pool, other.rate) == (one.pool, one.rate) and other.mode != one.mode]
        best = max((other.good for other in others), default=0.0)
        if one.mode == "auto" and one.good < best:
            print(f"auto is behind: {one.pool} at {one.rate:g} req/s, {one.good:.1%} of {best:.1%}")


def main() -> int:
    """Print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--prefill", type=int, action="append", help="how many of them prefill; several times to compare")
    parser.add_argument("--rates", default="8,16,24,32", help="requests per second")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--long", type=float, default=0.2, help="part of the requests that have a long prompt")
    parser.add_argument("--steps", default="256", help="step tokens of workers that decode; several to compare")
    parser.add_argument("--prefill-steps", type=int, default=2048, help="step tokens of workers that prefill")
    parser.add_argument("--transfer", choices=get_args(Transfer), default="push", help="who moves the blocks")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds")
    parser.add_argument("--itl", type=float, default=25.0, help="milliseconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tuning", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    os.nice(19)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    goal = Goal(ttft_s=asked.ttft, itl_s=asked.itl / 1e3)
    tuning = {name: float(value) for name, _, value in (one.partition("=") for one in asked.tuning)}
    modes = [mode for mode in MODES if mode in asked.modes.split(",")]
    ratios = [0, *(asked.prefill or range(1, asked.workers // 2 + 1))]
    done: list[Figures] = []
    if not asked.json:
        what = f"TTFT ≤ {asked.ttft:g} s and ITL p99 ≤ {asked.itl:g} ms"
        print(f"good: {what}; {asked.long:.0%} long prompts; seed {asked.seed}")
        print(HEAD)
    for rate in (float(text) for text in asked.rates.split(",")):
        requests = workload(rate=rate, seconds=asked.seconds, long_share=asked.long, seed=asked.seed)
        for prefill in ratios:
            for step_tokens in (int(text) for text in asked.steps.split(",")):
                pool = Pool(
                    prefill=prefill,
                    decode=asked.workers - prefill,
                    step_tokens=step_tokens,
                    prefill_step_tokens=asked.prefill_steps,
                    transfer=asked.transfer,
                )
                for mode in modes if prefill else MODES[:1]:
                    one = measure(requests, pool, mode, goal, rate=rate, tuning=tuning)
                    done.append(one)
                    if not asked.json:
                        show(one)
    if asked.json:
        json.dump([asdict(one) for one in done], sys.stdout, indent=2)
        print()
    else:
        conclude(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
