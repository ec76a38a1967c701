"""Plans one pool of a model at each tick and stores its state for a restart. No clock is read here, and no action taken."""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Any

import msgspec
import structlog

from headrace.config.options import PlannerSettings
from headrace.planner.capacity import Capacity, Demand, Need, Speed, Targets, capacity_of, need_by_slots, need_of
from headrace.planner.forecast import ForecastBook, forecasters, statsforecast_models
from headrace.planner.learning import (
    DemandSeries,
    Hysteresis,
    Learner,
    LiveConfidence,
    PeakKeeper,
    RecentRequests,
    SpeedCurve,
    StartUps,
)
from headrace.planner.observe import ROLES, Observation, stale
from headrace.planner.plan import REASONS, Plan, Reason, actions_for, most_leaving

RECENT_STEPS = 2  # of the series that are "lately"
WAITS_S = 30.0  # in which waits are looked at
VERSION = 2  # of the stored state

log = structlog.get_logger()


class RoleChoice(msgspec.Struct, frozen=True):
    """The number chosen for a role, and why."""

    supply: int  # workers that serve or are on their way
    need: int
    capacity: Capacity | None
    desired: int
    reason: Reason


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
        models = [
            *forecasters(round(self.settings.season_s / self.settings.step_s)),
            *statsforecast_models(self.settings.forecasters),
        ]
        book = ForecastBook(models, horizon=self.horizon, step_s=self.settings.step_s, confidence=self.confidence.value)
        book.recall(list(self.series.values))
        return book

    @property
    def horizon(self) -> int:
        """Steps until a worker that is started now can serve."""
        return max(1, ceil((self.starts.p90_s + self.settings.tick_s) / self.settings.step_s))

    def tick(self, seen: Observation) -> Plan:
        """Learn from an observation and decide. Unknown values are ignored."""
        self._learn(seen)
        if seen.workers is None:
            return self._plan(seen, {}, "workers_unknown")
        self.starts.see(seen.workers, at=seen.at)
        if stale(seen.workers, fresh_s=self.settings.fresh_s):
            return self._plan(seen, {}, "load_stale")
        demand = self._demand(seen)
        choices = self._at_most({role: self._choose(role, seen, demand) for role in self._roles_of(seen)})
        changes = [choice.desired - choice.supply for choice in choices.values()]
        if min(changes) < 0 < max(changes):
            return self._plan(seen, choices, "role_shift")
        return self._plan(seen, choices, min((choice.reason for choice in choices.values()), key=REASONS.index))

    def acted(self, plan: Plan) -> None:
        """Note that the actions of a plan were taken: starts are supply from now on, and numbers may not turn back soon."""
        for action in plan.actions:
            if action.kind == "start":
                self.starts.asked(action.role, at=plan.at)
        for role, desired in plan.desired.items():
            if desired > plan.supply.get(role, 0):
                self.roles[role].up_s = plan.at

    def _supply(self, role: str, seen: Observation) -> int:
        """Return the workers of a role that serve or are on their way."""
        return len(seen.of_role(role, "serving", "waking")) + self.starts.under_way(role)

    # -- learning ---------------------------------------------------------------------------------------------------------

    def _learn(self, seen: Observation) -> None:
        since_s, self.seen_s = self.seen_s, seen.at
        self.requests.note(seen)
        self.peak.note_ended(seen.ended)
        self.confidence.note(seen.ended)
        self.book.confidence = self.confidence.value
        unknown = seen.arrived is None and (seen.workers != () or seen.waiting is None)
        if seen.arrived or seen.refused or seen.waiting or self.arrived_s is None or unknown:
            self.arrived_s = seen.at  # unknown is not idle; but with no worker there what had arrived would wait
        if since_s is not None:
            arrived = None if seen.arrived is None else seen.arrived + seen.refused
            closed = self.series.add(arrived, since_s=since_s, until_s=seen.at)
            if closed:
                self.book.look_ahead(self.horizon)
            for value in closed:
                self.book.update(value)
                start_s = self.starts.p90_s + self.settings.tick_s
                self.peak.note(
                    value, self._tightest(seen), step_s=self.settings.step_s, start_s=start_s, most=self.settings.most
                )
        roles = [role for role in ROLES if seen.of_role(role)]
        for step in seen.steps if seen.workers is not None else ():
            own = "prefill" if step.prefill_tokens else "decode"  # those that only prefill have no sequences that decode
            for role in roles if len(roles) == 1 else {own}.intersection(roles):
                self.curves[role].learn(step)

    def _demand(self, seen: Observation) -> Demand:
        idle_s = seen.at - self.arrived_s if self.arrived_s is not None else 0.0
        ups = [one.up_s for one in self.roles.values() if one.up_s is not None]
        settled_s = max(ups) + self.starts.p90_s if ups else 0.0  # earlier waits were with fewer workers
        return Demand(
            rate=self.series.rate(RECENT_STEPS) or 0.0,
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
        if there in ([], ["aggregated"]):
            return ["aggregated"]
        return ["prefill", "decode", *(["aggregated"] if "aggregated" in there else [])]

    def _capacity(self, role: str, seen: Observation, *, serving: bool = False) -> Capacity | None:
        """Return the load that a worker of the role can take, None while that is not known."""
        shape, curve = self.requests.shape, self.curves[role]
        if shape is None or not curve.known:
            return None
        workers = [one for one in seen.workers or () if one.role == role and (one.state == "serving" or not serving)]
        slots = min((one.slots for one in workers if one.slots), default=0)
        kv_tokens = min((one.kv_tokens for one in workers if one.kv_tokens), default=0)
        return capacity_of(role, curve.speed(), shape, self.targets, slots=slots, kv_tokens=kv_tokens)

    def _tightest(self, seen: Observation) -> Capacity | None:
        """Return the capacity of the role that takes the fewest requests, None while none is known."""
        found = [self._capacity(role, seen, serving=True) for role in ROLES if seen.of_role(role)]
        return min((one for one in found if one is not None), key=lambda one: one.per_s, default=None)

    def _choose(self, role: str, seen: Observation, demand: Demand) -> RoleChoice:
        workers = seen.of_role(role)
        ready, supply, least = len(workers), self._supply(role, seen), self.settings.least
        capacity = self._capacity(role, seen)
        if role == "aggregated" and any(seen.of_role(one) for one in ("prefill", "decode")):
            return RoleChoice(supply, supply, capacity, supply, "steady")  # it can take either role, and is never surplus
        if capacity is not None:
            need = need_of(demand, capacity, self.targets, supply=supply, ready=ready, most=self.settings.most)
        else:
            held, slots = sum(one.held for one in workers), sum(one.slots for one in workers)
            need = need_by_slots(demand, held=held, slots=slots, supply=supply, ready=ready)
        if need.workers < least:
            need = Need(least, "below_minimum" if supply < least else "steady")
        kept = self.roles[role].note(need.workers, at=seen.at)
        choice = partial(RoleChoice, supply, need.workers, capacity)
        if need.workers > supply:
            return choice(need.workers, need.reason)
        if supply > ready and need.workers > ready:
            return choice(supply, "starting")
        if need.workers == supply:
            return choice(supply, "steady" if capacity is None or capacity.reachable else "target_unreachable")
        if seen.arrived is None or seen.waiting is None:
            return choice(supply, "arrivals_unknown")
        settled = self.roles[role].may_go_down(at=seen.at, start_s=self.starts.p90_s)
        if supply > ready or not settled or kept >= supply:
            return choice(supply, "settling")
        sequences = capacity.sequences if capacity is not None and role != "prefill" else 1_000_000
        gone = most_leaving(workers, supply - kept, waiting=seen.waiting, sequences=sequences)
        if not gone:
            return choice(supply, "would_not_fit")
        return choice(supply - gone, "idle" if need.reason == "idle" else "surplus")

    def _at_most(self, choices: dict[str, RoleChoice]) -> dict[str, RoleChoice]:
        """Take from the roles that want more until all fit, the largest first. No worker is drained for the bound alone."""
        found = dict(choices)
        while sum(one.desired for one in found.values()) > self.settings.most:
            larger = [role for role, one in found.items() if one.desired > one.supply]
            if not larger:
                break
            role = max(larger, key=lambda role: found[role].desired)
            one, fewer = found[role], found[role].desired - 1
            reason = "at_maximum" if fewer == one.supply else one.reason
            found[role] = RoleChoice(one.supply, one.need, one.capacity, fewer, reason)
        return found

    def _plan(self, seen: Observation, choices: dict[str, RoleChoice], reason: Reason) -> Plan:
        roles = list(choices) or [role for role in ROLES if seen.of_role(role)]
        supply = {role: self._supply(role, seen) for role in roles}
        desired = {role: choices[role].desired if role in choices else supply[role] for role in roles}
        forecast = self.book.forecast()
        return Plan(
            at=seen.at,
            model=seen.model,
            pool=seen.pool,
            reason=reason,
            desired=desired,
            supply=supply,
            needed={role: choice.need for role, choice in choices.items()},
            actions=tuple(actions_for(seen, {role: desired[role] - supply[role] for role in roles})),
            rate=self.series.rate(RECENT_STEPS),
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


def dump(planner: PoolPlanner, *, model: str, pool: str) -> bytes:
    """Return the bytes to store. The forecasters are not in them: they read the stored series again."""
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
