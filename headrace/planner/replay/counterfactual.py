"""Plays the past again with the planner and with fixed numbers of workers, and tells what each would have cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

import msgspec

from headrace.config.planner_settings import PlannerSettings
from headrace.planner.actions import Action
from headrace.planner.observation import Observation
from headrace.planner.pool_planner import PoolPlanner
from headrace.planner.replay.engines import Request
from headrace.planner.replay.world import Decide, Outcome, World, WorldSettings


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the comparison. `attained`: the share of requests within both targets."""

    who: str
    attained: float
    worker_hours: float
    most: int
    starts: int
    drains: int


def play_planner(requests: Sequence[Request], settings: PlannerSettings, world: WorldSettings) -> tuple[Played, dict[str, int]]:
    """Play with the planner. Returns the line, and how often it had each reason."""
    planner = PoolPlanner(settings, profile={"aggregated": world.speed})
    reasons: dict[str, int] = {}

    def decide(seen: Observation) -> Iterable[Action]:
        plan = planner.tick(seen)
        planner.acted(plan)
        reasons[plan.reason] = reasons.get(plan.reason, 0) + 1
        return plan.actions

    return _played("planner", _play(requests, world, decide), settings), reasons


def play_fixed(requests: Sequence[Request], settings: PlannerSettings, world: WorldSettings) -> list[Played]:
    """Play with 1, 2, 3 … workers that are always there, until one number has what the planner is asked for."""
    found: list[Played] = []
    for count in range(1, settings.most + 1):
        fixed = replace(world, first=count)
        found.append(_played(f"always {count}", _play(requests, fixed, lambda _seen: ()), settings))
        if found[-1].attained >= 1.0 - settings.miss:
            break
    return found


def _play(requests: Sequence[Request], world: WorldSettings, decide: Decide) -> Outcome:
    return World([copy(one) for one in requests], world, decide).run()


def _played(who: str, outcome: Outcome, settings: PlannerSettings) -> Played:
    return Played(
        who=who,
        attained=outcome.attained(ttft_s=settings.ttft_s, itl_s=settings.itl_s),
        worker_hours=outcome.worker_s / 3600,
        most=outcome.most,
        starts=sum(sign > 0 for _, sign in outcome.changes),
        drains=outcome.drains,
    )
