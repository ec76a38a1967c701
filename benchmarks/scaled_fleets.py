"""Compares one fleet of a model with two, each with as many workers as ever needed and each scaled by the planner.

    .venv/bin/python -m benchmarks.scaled_fleets --trace AzureLLMInferenceTrace_code_2023.csv --deployments tp8=4p+tp8=2p,tp2=4p

In virtual time with the real scheduler and the real planner.  The traffic is a recorded one, stretched as in
`benchmarks.planning`, several of it at once; a part of its requests has a tight target, as in `benchmarks.fleets`.  Each
fleet has a planner that sees what `headrace planner` sees of it, with the target that it is there for.  Worker hours count a
worker from when it is asked for until it has left, by its price.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from benchmarks.fleet_kinds import Kind, kinds_of
from benchmarks.fleets import long_prompt, with_targets
from benchmarks.planning.traffic import read, stretched
from headrace.broker.messages.events import EventKind
from headrace.config.options import PlannerSettings, for_fleet
from headrace.planner.capacity import Speed
from headrace.planner.observe import Observation, OutcomeSight, RequestSight, StepSight, WorkerSight
from headrace.planner.pool_planner import PoolPlanner
from headrace.router.placement.types import Placement
from headrace.tools.replay_bench.engine import ModelledEngine, ReplayFleet, ReplayJob
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, Trace, TraceRequest, chain_value
from headrace.tools.replay_bench.world import World, _Reporting, worker_info, worker_name

BEGAN_S = 1_700_000_000.0
BLOCK_STEP = 4096
MOST = 64  # workers of a fleet


@dataclass(slots=True)
class FleetWorkers:
    """A fleet, its planner, and what that one sees at its next tick."""

    kind: Kind
    planner: PoolPlanner | None  # None: their number never changes
    members: list[int] = field(default_factory=list)
    placed: list[RequestSight] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    ended: list[OutcomeSight] = field(default_factory=list)
    most: int = 0
    starts: int = 0
    drains: int = 0


@dataclass(slots=True, kw_only=True)
class ScaledWorld(World):
    """Simulates a pool whose fleets are scaled."""

    workers: dict[str, FleetWorkers]
    start_s: float = 60.0
    tick_s: float = 5.0
    _fleet_of: list[str] = field(default_factory=list, init=False)
    _asked_s: list[float] = field(default_factory=list, init=False)
    _left_s: list[float | None] = field(default_factory=list, init=False)
    _draining: set[int] = field(default_factory=set, init=False)
    _waited: int = field(default=0, init=False)

    def _begin(self) -> None:
        World._begin(self)
        for fleet in self.fleets:
            for _ in range(fleet.workers):
                self._join(fleet.name, 0.0)
        self._at(0.0, self._tick, None)

    def _join(self, name: str, asked_s: float) -> None:
        own = self.workers[name]
        own.members.append(len(self._fleet_of))
        own.most = max(own.most, len(own.members))
        self._fleet_of.append(name)
        self._asked_s.append(asked_s)
        self._left_s.append(None)

    def _tick(self, _: object) -> None:
        waiting = sum(clocked.router.scheduler.waiting for clocked in self._clocked)
        growth, self._waited = waiting - self._waited, waiting
        cheapest = min(self.workers, key=lambda name: self.workers[name].kind.price)
        for name, own in self.workers.items():
            for index in [one for one in own.members if one in self._draining and self._engines[one].idle]:
                self._leave(own, index)
            if own.planner is not None:
                self._plan(name, own, own.planner, waiting if name == cheapest else 0, growth if name == cheapest else 0)
        self._at(self._now_s + self.tick_s, self._tick, None)

    def _plan(self, name: str, own: FleetWorkers, planner: PoolPlanner, waiting: int, growth: int) -> None:
        engines = [self._engines[one] for one in own.members]
        seen = Observation(
            at=BEGAN_S + self._now_s,
            model="m",
            pool=name,
            arrived=max(0, len(own.placed) + growth),
            waiting=waiting,
            workers=tuple(self._sight(one) for one in engines),
            placed=tuple(own.placed),
            outputs=tuple(own.outputs),
            ended=tuple(own.ended),
            steps=tuple(
                StepSight(step_s=one.step_s, prefill_tokens=one.step_prefill_tokens, decodes=one.step_decodes)
                for one in engines
                if one.step_s
            ),
            price=own.kind.price,
        )
        own.placed, own.outputs, own.ended = [], [], []
        plan = planner.tick(seen)
        planner.acted(plan)
        for action in plan.actions:
            if action.kind == "start":
                own.starts += 1
                self._at(self._now_s + self.start_s, self._ready, (name, self._now_s))
            elif action.kind == "drain":
                own.drains += 1
                self._drain(own, self._worker_of[action.worker])

    def _sight(self, engine: ModelledEngine) -> WorkerSight:
        return WorkerSight(
            worker=self._names[engine.index],
            role="aggregated",
            state="draining" if engine.index in self._draining else "serving",
            slots=engine.model.slots,
            running=engine.running + engine.waiting,
            queued_prefill_tokens=engine.prompt_tokens_left(self._now_s),
            report_age_s=0.2,
            start_s=self.start_s,
        )

    def _ready(self, subject: tuple[str, float]) -> None:
        name, asked_s = subject
        kind, index = self.workers[name].kind, len(self._engines)
        worker = worker_name(index)
        self._engines.append(ModelledEngine(kind.model, index=index))
        self._reporting.append(_Reporting())
        self._step_of.append(0)
        self._names.append(worker)
        self._worker_of[worker] = index
        self._join(name, asked_s)
        for clocked in self._clocked:
            clocked.router.view.add_worker(worker, capacity_blocks=kind.model.blocks)
            clocked.router.scheduler.put_worker(worker_info(worker, kind.model, fleet=name, price=kind.price), self._now_s)
            clocked.dirty = True
        self._report(self._engines[index])

    def _drain(self, own: FleetWorkers, index: int) -> None:
        self._draining.add(index)
        kind = own.kind
        info = worker_info(self._names[index], kind.model, fleet=self._fleet_of[index], price=kind.price)
        for clocked in self._clocked:
            clocked.router.scheduler.put_worker(dataclasses.replace(info, draining=True), self._now_s)

    def _leave(self, own: FleetWorkers, index: int) -> None:
        own.members.remove(index)
        self._left_s[index] = self._now_s
        for clocked in self._clocked:
            clocked.router.scheduler.remove_worker(self._names[index], self._now_s)
            clocked.router.view.drop_worker(self._names[index])

    def _report(self, engine: ModelledEngine) -> None:
        if self._left_s[engine.index] is None:
            World._report(self, engine)

    def _send_report(self, engine: ModelledEngine) -> None:
        if self._left_s[engine.index] is None:
            World._send_report(self, engine)

    def _place(self, placement: Placement, by: str) -> None:
        World._place(self, placement, by)
        own = self.workers[self._fleet_of[self._worker_of[placement.worker]]]
        own.placed.append(
            RequestSight(prompt=placement.request.tokens, uncached=placement.uncached, waited_s=placement.waited_s)
        )

    def _send_event(self, kind: EventKind, job: ReplayJob) -> None:
        World._send_event(self, kind, job)
        if kind == "settled":
            own, output = self.workers[self._fleet_of[job.worker]], job.request.output
            itl_s = (job.end_s - job.first_s) / (output - 1) if output > 1 else 0.0
            own.outputs.append(output)
            own.ended.append(OutcomeSight(ttft_s=job.first_s - job.request.at_s, itl_s=itl_s))

    def worker_hours(self, until_s: float) -> float:
        """Return the price of all workers up to a time."""
        found = 0.0
        for name, asked_s, left_s in zip(self._fleet_of, self._asked_s, self._left_s, strict=True):
            found += self.workers[name].kind.price * max(0.0, min(left_s if left_s is not None else until_s, until_s) - asked_s)
        return found / 3600.0


def traffic(path: Path, *, minutes: tuple[float, float], times: int) -> Trace:
    """Return a stretched trace, `times` of them at once, of prompts that share nothing: of each the part to be computed."""
    recorded = read(path)
    found = [one for seed in range(1, times + 1) for one in stretched(recorded, minutes=minutes, seed=seed)]
    rows = []
    for number, one in enumerate(sorted(found, key=lambda one: one.at)):
        chain = tuple(chain_value(number * BLOCK_STEP + block) for block in range(-(-one.uncached // BLOCK_TOKENS)))
        rows.append(TraceRequest(at_s=one.at, tokens=one.uncached, output=max(one.output, 1), chain=chain))
    return Trace(str(path), tuple(rows))


def planner_of(kind: Kind, settings: PlannerSettings) -> PoolPlanner:
    """Make the planner of the fleet of this kind, as `headrace planner` makes one for each fleet."""
    model = kind.model
    speed = Speed(base_s=model.base_s, prefill_s=1.0 / model.prefill_rate, decode_s=model.decode_s, context_s=0.0)
    return PoolPlanner(for_fleet(settings, kind.name), profile={"aggregated": speed})


def play(
    trace: Trace, first: Mapping[str, int], kinds: Mapping[str, Kind], planners: Mapping[str, PoolPlanner], *, start_s: float
) -> dict[str, object]:
    """Play a deployment and tell what became of it. `first`: workers by kind at the beginning."""
    fleets = tuple(
        ReplayFleet(name=name, price=kinds[name].price, workers=number, model=kinds[name].model)
        for name, number in first.items()
    )
    own = {name: FleetWorkers(kinds[name], planners.get(name)) for name in first}
    policy = Policy(name="kv", settings={"limits.hopeless": False, "limits.window": 1_000_000})
    world = ScaledWorld(trace=trace, fleets=fleets, make_router=policy.router, workers=own, start_s=start_s)
    outcomes = world.run()
    tight_s = min(one.ttft_target_s or 0.0 for one in trace.requests)
    met: dict[bool, list[bool]] = {True: [], False: []}
    close = []
    for one in outcomes:
        target_s, took_s = one.job.request.ttft_target_s or 0.0, one.job.first_s - one.job.request.at_s
        met[target_s <= tight_s].append(took_s <= target_s)
        close.append(abs(one.predicted_ttft_s - took_s) <= 0.2 * took_s)
    return {
        "first": dict(first),
        "planned": sorted(planners),
        "tight_met": round(sum(met[True]) / len(met[True]), 4),
        "loose_met": round(sum(met[False]) / len(met[False]), 4),
        "within_fifth": round(sum(close) / len(close), 4),
        "held_hours": round(world.worker_hours(trace.requests[-1].at_s), 3),
        "worker_hours": round(world.worker_hours(max(one.job.end_s for one in outcomes)), 3),
        "most": {name: one.most for name, one in own.items()},
        "starts": {name: one.starts for name, one in own.items()},
        "drains": {name: one.drains for name, one in own.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each deployment that is asked for."""
    parser = argparse.ArgumentParser(description="One fleet of a model against two, with the planner and without.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--minutes", default="0,25")
    parser.add_argument("--times", type=int, default=4, help="so many of the stretched trace at once")
    parser.add_argument("--tight", type=float, default=1.4)
    parser.add_argument("--loose", type=float, default=10.0)
    parser.add_argument("--strict", type=float, default=0.25)
    parser.add_argument("--miss", type=float, default=0.05)
    parser.add_argument("--start", type=float, default=60.0)
    parser.add_argument(
        "--deployments", required=True, help="tp8=3,tp2=8 or, with the planner, tp8=3p,tp2=8p; + between several"
    )
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    begin, end = (float(one) for one in chosen.minutes.split(","))
    trace = traffic(chosen.trace, minutes=(begin, end), times=chosen.times)
    kinds = {kind.name: kind for kind in kinds_of("parallel")}
    unit_s = long_prompt(trace) / max(kind.model.prefill_rate for kind in kinds.values())
    ttft_s, loose_s = round(chosen.tight * unit_s, 3), round(chosen.loose * unit_s, 3)
    trace = with_targets(trace, strict=chosen.strict, ttft_s=ttft_s, loose_s=loose_s)
    told = {"ttft_s": ttft_s, "loose_s": loose_s, "requests": len(trace.requests), "arriving_s": trace.requests[-1].at_s}
    print(json.dumps(told), flush=True)
    for deployment in chosen.deployments.split("+"):
        parts = dict(one.split("=") for one in deployment.split(","))
        first = {name: int(number.rstrip("p")) for name, number in parts.items()}
        dearest = max(first, key=lambda name: kinds[name].price)
        settings = PlannerSettings(
            ttft_s=loose_s,
            fleet_ttft=f"{dearest}={ttft_s}",
            itl_s=10.0,
            miss=chosen.miss,
            start_s=chosen.start,
            most=MOST,
        )
        planners = {name: planner_of(kinds[name], settings) for name, number in parts.items() if number.endswith("p")}
        print(json.dumps(play(trace, first, kinds, planners, start_s=chosen.start)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
