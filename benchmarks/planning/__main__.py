"""Compares the planner with a clairvoyant, Dynamo's published rules and fixed numbers of workers, in virtual time.

.venv/bin/python -m benchmarks.planning --trace AzureLLMInferenceTrace_code_2023.csv --traffic stretched --start 60,300
.venv/bin/python -m benchmarks.planning --traffic waves --start 60,300
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from pathlib import Path

import structlog

from benchmarks.planning.clairvoyant import Clairvoyant
from benchmarks.planning.dynamo_rules import Predictor, PublishedRules
from benchmarks.planning.traffic import read, stretched, waves
from headrace.config.options import PlannerSettings
from headrace.planner.capacity import Speed, Targets
from headrace.planner.observe import Observation
from headrace.planner.plan import Action
from headrace.planner.pool_planner import PoolPlanner
from headrace.planner.replay import Outcome, Request, World, WorldSettings

FAST = Speed()  # 10,000 prompt tokens/s
SLOW = Speed(base_s=0.1, prefill_s=8e-4, decode_s=8e-4, context_s=4e-8)  # fewer steps to simulate
Decide = Callable[[Observation], Iterable[Action]]


class Arena:
    """The world of a comparison: a traffic, a kind of engines, a start-up time."""

    def __init__(self, requests: Sequence[Request], *, speed: Speed, start_s: float, targets: Targets, most: int) -> None:
        self._requests = requests
        self.speed, self.start_s, self.targets, self.most = speed, start_s, targets, most

    def play(self, who: str, decide: Decide, *, first: int = 1) -> dict[str, object]:
        """Play and return what became of it."""
        requests = [copy(one) for one in self._requests]
        world = WorldSettings(speed=self.speed, start_s=self.start_s, first=first)
        return self._told(who, World(requests, world, decide).run())

    def _told(self, who: str, outcome: Outcome) -> dict[str, object]:
        firsts = sorted(one.first_s - one.at if one.first_s is not None else float("inf") for one in outcome.requests)
        attained = outcome.attained(ttft_s=self.targets.ttft_s, itl_s=self.targets.itl_s)
        return {
            "who": who,
            "start_s": self.start_s,
            "attained": round(attained, 5),
            "missed": round((1.0 - attained) * len(outcome.requests)),
            "worker_hours": round(outcome.worker_s / 3600.0, 3),
            "ttft_p90_s": round(firsts[int(0.9 * len(firsts))], 2),
            "ttft_p99_s": round(firsts[int(0.99 * len(firsts))], 2),
            "most": outcome.most,
            "starts": outcome.starts,
            "drains": outcome.drains,
            "turns": turns(outcome.changes, within_s=2.0 * self.start_s),
            "failed": outcome.failed,
        }

    def planner(self, **chosen: float | str) -> Decide:
        """Return the planner's decision, which acts on what it has planned."""
        values = {
            "ttft_s": self.targets.ttft_s,
            "itl_s": self.targets.itl_s,
            "miss": self.targets.miss,
            "start_s": self.start_s,
            "most": self.most,
            **chosen,
        }
        planner = PoolPlanner(PlannerSettings(**values), profile={"aggregated": self.speed})  # type: ignore[arg-type]

        def decide(seen: Observation) -> Iterable[Action]:
            plan = planner.tick(seen)
            planner.acted(plan)
            return plan.actions

        return decide

    def published(self, predictor: Predictor) -> Decide:
        """Return Dynamo's published rules."""
        ttft_s, itl_s = self.targets.ttft_s, self.targets.itl_s
        return PublishedRules(speed=self.speed, ttft_s=ttft_s, itl_s=itl_s, most=self.most, predictor=predictor).decide

    def clairvoyant(self, *, kept_s: float = 0.0) -> Decide:
        """Return the clairvoyant's decision."""
        return Clairvoyant(
            self._requests, speed=self.speed, targets=self.targets, start_s=self.start_s, most=self.most, kept_s=kept_s
        ).decide


def turns(changes: Sequence[tuple[float, int]], *, within_s: float) -> int:
    """Return how often the number of workers went up, down and up again within a time."""
    found, up_s, down_s = 0, None, None
    for at, sign in changes:
        if sign < 0:
            down_s = at
            continue
        if up_s is not None and down_s is not None and down_s >= up_s and at - up_s < within_s:
            found += 1
        up_s, down_s = at, None
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each planner and start-up time."""
    parser = argparse.ArgumentParser(description="Planners on the same simulated engines.")
    parser.add_argument("--trace", type=Path, help="a file of the Azure traces' form, or of Mooncake's")
    parser.add_argument("--traffic", choices=("stretched", "raw", "waves"), default="stretched")
    parser.add_argument("--minutes", default="0,25", help="the part of the trace that is stretched")
    parser.add_argument("--ttft", type=float, default=4.0, help="target of the first token with a trace, seconds")
    parser.add_argument("--start", default="60", help="start-up times, with commas between")
    parser.add_argument("--seed", type=int, default=1, help="of the stretching, and of the waves")
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--confidence", default="", help="of planners whose quantile does not move, with commas between")
    parser.add_argument("--forecasters", default="", help="models of statsforecast for the planner, with commas between")
    parser.add_argument("--who", default="planner,clairvoyant,bound,kalman,constant,fixed")
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if chosen.traffic == "waves":
        requests, speed, targets = (
            waves(3.0, period_s=5400.0, peak=5.0, seed=chosen.seed),
            SLOW,
            Targets(ttft_s=12.0, itl_s=1.2),
        )
    elif chosen.trace is None:
        parser.error("--trace is needed")
    else:
        requests = read(chosen.trace)
        if chosen.traffic == "stretched":
            begin, end = (float(one) for one in chosen.minutes.split(","))
            requests = stretched(requests, minutes=(begin, end), seed=chosen.seed)
        speed, targets = FAST, Targets(ttft_s=chosen.ttft, itl_s=0.25)
    who = chosen.who.split(",")
    for number, start_s in enumerate(float(one) for one in chosen.start.split(",")):
        arena = Arena(requests, speed=speed, start_s=start_s, targets=targets, most=chosen.most)
        players: dict[str, Decide] = {
            "planner": arena.planner(forecasters=chosen.forecasters),
            **{
                f"planner {one}": arena.planner(confidence=float(one), adapt=False, forecasters=chosen.forecasters)
                for one in chosen.confidence.split(",")
                if one
            },
            "clairvoyant": arena.clairvoyant(),
            "bound": arena.clairvoyant(kept_s=2.0 * start_s),
            "kalman": arena.published("kalman"),
            "constant": arena.published("constant"),
        }
        for name, decide in players.items():
            if name.partition(" ")[0] in who:
                print(json.dumps({"traffic": chosen.traffic, **arena.play(name, decide)}), flush=True)
        if "fixed" in who and number == 0:  # start-ups are nothing to it
            for count in range(1, chosen.most + 1):
                line = arena.play(f"always {count}", lambda _seen: (), first=count)
                print(json.dumps({"traffic": chosen.traffic, **line}), flush=True)
                if float(str(line["attained"])) >= 1.0 - targets.miss:
                    break
    return 0


if __name__ == "__main__":
    sys.exit(main())
