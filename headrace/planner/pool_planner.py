"""Plans one pool of a model at each tick and stores its state for a restart. No clock is read here, and no action taken."""

from __future__ import annotations

from math import ceil
from typing import Any

import msgspec
import structlog

from headrace.config.options import PlannerSettings
from headrace.planner.capacity import (
    Capacity,
    Speed,
    SpeedCurve,
    StartUps,
    Targets,
    aggregated_capacity,
    decode_capacity,
    prefill_capacity,
)
from headrace.planner.forecast import ForecastBook, all_forecasters, forecasters
from headrace.planner.memory import Learner
from headrace.planner.needs import (
    Demand,
    DemandSeries,
    Hysteresis,
    LiveConfidence,
    Need,
    PeakKeeper,
    RecentRequests,
    need_by_slots,
    need_of,
)
from headrace.planner.observe import ROLES, Observation, WorkerSight, stale
from headrace.planner.plan import Plan, Reason, actions_for, most_leaving

RECENT_STEPS = 2  # of the series that are "lately"
WAITS_S = 30.0  # in which waits are looked at

# Which reason stands for a tick on which roles differ: the first of these that any of them has.
_FIRST: tuple[Reason, ...] = (
    "role_shift",
    "below_minimum",
    "from_zero",
    "batch_deadline",
    "backlog",
    "waits_late",
    "slots_full",
    "forecast",
    "peak_kept",
    "at_maximum",
    "idle",
    "surplus",
    "would_not_fit",
    "arrivals_unknown",
    "starting",
    "settling",
    "target_unreachable",
    "steady",
)


class RoleChoice(msgspec.Struct, frozen=True):
    """The number chosen for a role, and why."""

    desired: int
    reason: Reason
    need: int
    capacity: Capacity | None = None


class PoolPlanner(Learner):
    KEPT = {
        **dict.fromkeys(("series", "starts", "requests", "curves", "roles", "confidence", "peak")),
        **dict.fromkeys(("seen_s", "arrived_s"), float | None),
    }

    def __init__(self, settings: PlannerSettings, *, profile: dict[str, Speed] | None = None) -> None:
        """`profile`: measured speeds by role, which seed the curves. Raises SettingsError for a forecaster that is missing."""
        self.settings = settings
        self.targets = Targets(ttft_s=settings.ttft_s, itl_s=settings.itl_s, miss=settings.miss)
        self.series = DemandSeries(step_s=settings.step_s, keep_s=settings.season_s + 3600.0)
        self.starts = StartUps(first_s=settings.start_s)
        self.requests = RecentRequests()
        self.curves = {role: SpeedCurve((profile or {}).get(role)) for role in ROLES}
        self.roles = {role: Hysteresis(window_s=settings.down_s) for role in ROLES}
        self.confidence = LiveConfidence(settings.confidence, self.targets, moves=settings.adapt)
        self.peak = PeakKeeper(self.targets, season_s=settings.season_s)
        self.book = self.new_book()
        self.seen_s: float | None = None
        self.arrived_s: float | None = None  # when something arrived last

    def new_book(self) -> ForecastBook:
        """Return a book that has read the series so far."""
        season = round(self.settings.season_s / self.settings.step_s)
        book = ForecastBook(
            season=season,
            horizon=self.horizon,
            step_s=self.settings.step_s,
            confidence=self.confidence.value,
            models=all_forecasters(forecasters(season), self.settings.forecasters),
        )
        book.recall(list(self.series.values))
        return book

    @property
    def horizon(self) -> int:
        """Steps until a worker that is started now can serve."""
        return max(1, ceil((self.starts.p90_s + self.settings.tick_s) / self.settings.step_s))

    def tick(self, seen: Observation) -> Plan:
        """Learn from an observation and decide. Unknown values are ignored."""
        since_s, self.seen_s = self.seen_s, seen.at
        self._learn(seen, since_s)
        if seen.workers is None:
            return self._plan(seen, {}, "workers_unknown")
        self.starts.see(seen.workers, at=seen.at)
        if stale(seen.workers, fresh_s=self.settings.fresh_s):
            return self._plan(seen, {}, "load_stale")
        demand = self._demand(seen)
        choices = {role: self._choose(role, seen, demand) for role in self._roles_of(seen)}
        choices = self._within_budget(seen, choices)
        return self._plan(seen, choices, _reason_of(seen, self, choices))

    def acted(self, plan: Plan) -> None:
        """Note that the actions of a plan were taken: starts are supply from now on, and numbers may not turn back soon."""
        for action in plan.actions:
            if action.kind == "start":
                self.starts.asked(action.role, at=plan.at)
        for role, desired in plan.desired.items():
            self.roles[role].went(desired - plan.supply.get(role, 0), at=plan.at)

    def supply(self, role: str, seen: Observation) -> tuple[int, int]:
        """Return the workers of a role that serve, and those that serve or are on their way."""
        ready = len(seen.of_role(role))
        return ready, ready + len(seen.of_role(role, "waking")) + self.starts.under_way(role)

    # -- learning ---------------------------------------------------------------------------------------------------------

    def _learn(self, seen: Observation, since_s: float | None) -> None:
        self.requests.note(seen)
        self.peak.note_ended(seen.ended)
        if self.confidence.note(seen.ended):
            self.book.expect(self.confidence.value)
        if seen.arrived or seen.refused or seen.waiting:
            self.arrived_s = seen.at
        elif self.arrived_s is None or (seen.arrived is None and (seen.workers != () or seen.waiting is None)):
            self.arrived_s = seen.at  # unknown is not idle; but with no worker there what had arrived would wait
        if since_s is not None:
            arrived = None if seen.arrived is None else seen.arrived + seen.refused
            closed = self.series.add(arrived, since_s=since_s, until_s=seen.at)
            if closed:
                self.book.look_ahead(self.horizon)
            for value in closed:
                self.book.update(value)
                self.peak.note(
                    value,
                    self._tightest(seen),
                    step_s=self.settings.step_s,
                    start_s=self.starts.p90_s + self.settings.tick_s,
                    most=self.settings.most,
                )
        if seen.workers is None:
            return
        roles = [role for role in ROLES if seen.of_role(role)]
        for step in seen.steps:
            for role in roles[:1] if len(roles) == 1 else _roles_of_step(step.prefill_tokens, roles):
                self.curves[role].learn(
                    step.step_s, prefill_tokens=step.prefill_tokens, decodes=step.decodes, context_tokens=step.context_tokens
                )

    def _demand(self, seen: Observation) -> Demand:
        known = self.series.known(RECENT_STEPS)
        idle_s = seen.at - self.arrived_s if self.arrived_s is not None else 0.0
        ups = [one.up_s for one in self.roles.values() if one.up_s is not None]
        settled_s = max(ups) + self.starts.p90_s if ups else 0.0  # earlier waits were with fewer workers
        return Demand(
            rate=sum(known) / len(known) if known else 0.0,
            forecast=self.book.forecast(),
            waiting=seen.waiting or 0,
            wait_s=self.requests.wait_s(0.95, since_s=max(seen.at - WAITS_S, settled_s)),
            backlog=seen.backlog,
            idle=self.settings.least == 0 and idle_s >= self.settings.idle_s,
            start_s=self.starts.p90_s,
            kept=self.peak.rate,
        )

    # -- choosing ---------------------------------------------------------------------------------------------------------

    def _roles_of(self, seen: Observation) -> list[str]:
        there = [role for role in ROLES if any(one.role == role for one in seen.workers or ()) or self.starts.under_way(role)]
        split = [role for role in ("prefill", "decode") if role in there]
        return ["prefill", "decode", *(["aggregated"] if "aggregated" in there else [])] if split else ["aggregated"]

    def capacity(self, role: str, workers: list[WorkerSight]) -> Capacity | None:
        """Return what a worker of the role can take, None while that is not known."""
        shape, curve = self.requests.shape, self.curves[role]
        if shape is None or not curve.known:
            return None
        if role == "prefill":
            return prefill_capacity(curve.speed(), shape, self.targets)
        slots = min((one.slots for one in workers if one.slots), default=0)
        kv_tokens = min((one.kv_tokens for one in workers if one.kv_tokens), default=0)
        capacity = decode_capacity if role == "decode" else aggregated_capacity
        return capacity(curve.speed(), shape, self.targets, slots=slots, kv_tokens=kv_tokens)

    def _tightest(self, seen: Observation) -> Capacity | None:
        """Return the capacity of the role that takes the fewest requests, None while none is known."""
        found = [self.capacity(role, seen.of_role(role)) for role in ROLES if seen.of_role(role)]
        return min((one for one in found if one is not None), key=lambda one: one.per_s, default=None)

    def _choose(self, role: str, seen: Observation, demand: Demand) -> RoleChoice:
        workers = seen.of_role(role)
        ready, supply = self.supply(role, seen)
        capacity = self.capacity(role, [one for one in seen.workers or () if one.role == role])
        if role == "aggregated" and any(seen.of_role(one) for one in ("prefill", "decode")):
            return RoleChoice(supply, "steady", supply, capacity)  # it can take either role, and is never surplus
        if capacity is not None:
            need = need_of(demand, capacity, self.targets, supply=supply, ready=ready, most=self.settings.most)
        else:
            held, slots = sum(one.held for one in workers), sum(one.slots for one in workers)
            need = need_by_slots(demand, held=held, slots=slots, supply=supply, ready=ready)
        if need.workers < self.settings.least:
            need = Need(self.settings.least, "below_minimum" if supply < self.settings.least else "steady")
        kept = self.roles[role].note(need.workers, at=seen.at)
        if need.workers > supply:
            return RoleChoice(need.workers, need.reason, need.workers, capacity)
        if supply > ready and need.workers > ready:
            return RoleChoice(supply, "starting", need.workers, capacity)
        if need.workers < supply:
            return self._fewer(role, seen, need, kept, capacity)
        unreachable = capacity is not None and not capacity.reachable
        return RoleChoice(supply, "target_unreachable" if unreachable else "steady", need.workers, capacity)

    def _fewer(self, role: str, seen: Observation, need: Need, kept: int, capacity: Capacity | None) -> RoleChoice:
        """Choose a smaller number, unless a reason forbids it."""
        workers = seen.of_role(role)
        ready, supply = self.supply(role, seen)
        if seen.arrived is None or seen.waiting is None:
            return RoleChoice(supply, "arrivals_unknown", need.workers, capacity)
        settled = self.roles[role].may_go_down(at=seen.at, start_s=self.starts.p90_s)
        if supply > ready or not settled or kept >= supply:
            return RoleChoice(supply, "settling", need.workers, capacity)
        sequences = capacity.sequences if capacity is not None and role != "prefill" else 1_000_000
        gone = most_leaving(workers, supply - max(kept, need.workers), waiting=seen.waiting, sequences=sequences)
        if not gone:
            return RoleChoice(supply, "would_not_fit", need.workers, capacity)
        return RoleChoice(supply - gone, "idle" if need.reason == "idle" else "surplus", need.workers, capacity)

    def _within_budget(self, seen: Observation, choices: dict[str, RoleChoice]) -> dict[str, RoleChoice]:
        """Take from the roles that want more until all fit, the largest first. No worker is drained for the budget alone."""
        wanted = {role: choice.desired for role, choice in choices.items()}
        floor = {role: min(choice.desired, self.supply(role, seen)[1]) for role, choice in choices.items()}
        while sum(wanted.values()) > self.settings.most:
            larger = [role for role in wanted if wanted[role] > floor[role]]
            if not larger:
                break
            wanted[max(larger, key=lambda role: wanted[role])] -= 1
        return {
            role: choice
            if wanted[role] == choice.desired
            else RoleChoice(
                wanted[role],
                "at_maximum" if wanted[role] <= self.supply(role, seen)[1] else choice.reason,
                choice.need,
                choice.capacity,
            )
            for role, choice in choices.items()
        }

    def _plan(self, seen: Observation, choices: dict[str, RoleChoice], reason: Reason) -> Plan:
        roles = list(choices) or [role for role in ROLES if seen.of_role(role)]
        supply = {role: self.supply(role, seen)[1] for role in roles}
        desired = {role: choices[role].desired if role in choices else supply[role] for role in roles}
        forecast = self.book.forecast()
        known = self.series.known(RECENT_STEPS)
        return Plan(
            at=seen.at,
            model=seen.model,
            pool=seen.pool,
            reason=reason,
            desired=desired,
            supply=supply,
            needed={role: choice.need for role, choice in choices.items()},
            actions=tuple(actions_for(seen, {role: desired[role] - supply[role] for role in roles})),
            rate=sum(known) / len(known) if known else None,
            forecast=forecast.value if forecast is not None else None,
            forecast_low=forecast.low if forecast is not None else None,
            forecast_high=forecast.high if forecast is not None else None,
            forecaster=forecast.by if forecast is not None else "",
            starting={role: self.starts.under_way(role) for role in roles},
            capacity={role: one.capacity.per_s for role, one in choices.items() if one.capacity is not None},
            start_s=self.starts.p90_s,
            price=seen.price,
            confidence=self.confidence.value,
            waiting=seen.waiting,
        )


def _roles_of_step(prefill_tokens: int, roles: list[str]) -> list[str]:
    """Return whose step it was where several roles are there: those that only prefill have no sequences that decode."""
    wanted = "prefill" if prefill_tokens else "decode"
    return [role for role in roles if role == wanted]


def _reason_of(seen: Observation, planner: PoolPlanner, choices: dict[str, RoleChoice]) -> Reason:
    changes = [choice.desired - planner.supply(role, seen)[1] for role, choice in choices.items()]
    if any(change > 0 for change in changes) and any(change < 0 for change in changes):
        return "role_shift"
    reasons = {choice.reason for choice in choices.values()}
    return next(reason for reason in _FIRST if reason in reasons)


# Stores what a planner knows of a pool and takes it over again, so that a restart forgets nothing.
#
# The forecasters are not stored: they read the stored series again and are then as they were.

log = structlog.get_logger()

VERSION = 2


def dump(planner: PoolPlanner, *, model: str, pool: str) -> bytes:
    """Return the bytes to store."""
    return msgspec.msgpack.encode({"version": VERSION, "model": model, "pool": pool, **planner.dump()})


def load(planner: PoolPlanner, data: bytes, *, model: str, pool: str) -> bool:
    """Take stored bytes over into a fresh planner. Returns False, and logs, for those of another version, model or pool."""
    try:
        stored = msgspec.msgpack.decode(data, type=dict[str, Any])
        of = stored["version"], stored["model"], stored["pool"]
        if of != (VERSION, model, pool):
            raise ValueError(f"it is version {of[0]} of {of[1]} in {of[2]}")
        planner.load(stored)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
        log.warning("planner.memory_unreadable", pool=pool, error=str(error))
        return False
    planner.book = planner.new_book()
    return True
