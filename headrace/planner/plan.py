"""A plan: numbers of workers, actions and exactly one named reason; victims, the order of actions, and the shared budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Literal, get_args

import msgspec

from headrace.planner.observe import ROLES, Observation, WorkerSight

# Decides what may leave: a what-if of the load on fewer workers, and the workers with the least held work.

ROOM = 0.85  # of slots and KV blocks that the rest may be filled to


def fits(workers: Sequence[WorkerSight], rest: int, *, waiting: int, sequences: int) -> bool:
    """Return whether what these serving workers hold, and what waits, fits on `rest` of them.

    `sequences`: those that one may decode at once within its target. Where a load is unknown, nothing may leave.
    """
    if any(one.report_age_s is None for one in workers):
        return False
    held = sum(one.held for one in workers) + waiting
    if rest <= 0:
        return held == 0
    limits = [min(one.slots or sequences, sequences) for one in workers]
    if held > ROOM * rest * min(limits, default=sequences):
        return False
    used = [one.kv_used for one in workers if one.kv_used is not None]
    return not used or sum(used) / rest <= ROOM


def most_leaving(workers: Sequence[WorkerSight], leave: int, *, waiting: int, sequences: int) -> int:
    """Return how many of at most `leave` workers can go, 0 if none."""
    count = len(workers)
    for gone in range(min(leave, count), 0, -1):
        if fits(workers, count - gone, waiting=waiting, sequences=sequences):
            return gone
    return 0


def victims(workers: Sequence[WorkerSight], leave: int) -> list[WorkerSight]:
    """Return the workers with the least held work, those that fill the fewest blocks first among equals."""
    return sorted(workers, key=lambda one: (one.held, one.kv_used or 0.0, one.worker))[:leave]


ActionKind = Literal["role", "wake", "start", "drain"]


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step towards the wanted numbers. `worker` is empty for a start.

    `role` is the role that it shall have, of a drain the one that it has.
    """

    kind: ActionKind
    role: str
    worker: str = ""


def actions_for(observation: Observation, change: Mapping[str, int]) -> list[Action]:
    """Return how to change the numbers of workers by role by `change`: roles first, then sleepers, then starts; drains last.

    A worker that is to go and can take a role in which one is missing changes it instead: seconds, and no start.
    """
    missing = {role: change.get(role, 0) for role in ROLES if change.get(role, 0) > 0}
    leaving: list[WorkerSight] = []
    for role in ROLES:
        if change.get(role, 0) < 0:
            leaving += victims(observation.of_role(role), -change[role])
    actions: list[Action] = []
    for role in missing:
        for worker in [one for one in leaving if role in one.roles]:
            if missing[role] and worker in leaving:
                actions.append(Action(kind="role", role=role, worker=worker.worker))
                leaving.remove(worker)
                missing[role] -= 1
    for role in missing:
        asleep = sorted(observation.of_role(role, "asleep"), key=lambda one: one.worker)[: missing[role]]
        actions += [Action(kind="wake", role=role, worker=one.worker) for one in asleep]
        actions += [Action(kind="start", role=role)] * (missing[role] - len(asleep))
    return [*actions, *(Action(kind="drain", role=one.role, worker=one.worker) for one in leaving)]


Reason = Literal[
    "workers_unknown",  # the members could not be read: nothing is decided
    "load_stale",  # too few workers have reported lately: nothing is decided
    "below_minimum",
    "from_zero",  # requests wait, and no worker is there or on its way
    "forecast",  # more are needed when a worker that is started now can serve
    "peak_kept",  # bursts come sooner than a worker can start: as many as the highest load of the day needs stay
    "backlog",  # more are needed to clear what waits
    "waits_late",  # requests wait longer than they may, though the rates say that there are enough
    "slots_full",  # nothing is known of speeds yet, and the workers are full
    "batch_deadline",
    "role_shift",  # a role has too many and another one too few
    "over_budget",  # more are needed than all pools together may cost
    "at_maximum",  # more are needed than are allowed
    "starting",  # those that are on their way are enough
    "arrivals_unknown",  # what arrives now is not known: no worker may leave
    "settling",  # fewer would do, but the last start is too young, or the need was higher a moment ago
    "would_not_fit",  # fewer would do, but what they hold does not fit on the rest
    "surplus",
    "idle",  # nothing has arrived for so long that none is needed
    "target_unreachable",  # no number of workers meets the target: the load alone decides
    "steady",
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about a pool. `desired`: workers by role; `supply`: those that serve or are on their way."""

    at: float
    model: str
    pool: str
    reason: Reason
    desired: dict[str, int]
    supply: dict[str, int]
    needed: dict[str, int] = {}
    actions: tuple[Action, ...] = ()
    rate: float | None = None  # requests a second, lately
    forecast: float | None = None  # at the time at which a worker that is started now can serve
    forecast_low: float | None = None
    forecast_high: float | None = None
    forecaster: str = ""
    starting: dict[str, int] = {}  # starts that were asked for before and are still on their way, by role
    capacity: dict[str, float] = {}  # requests a second of one worker, by role
    start_s: float = 0.0
    price: float = 0.0  # of one worker for an hour, 0 = not given
    waiting: int | None = None
    confidence: float = 0.0  # quantile of the forecast that was planned for
    detail: str = ""


# Divides what all pools together may cost: what is there counts first, then starts in the order of the pools' priority.
#
# A worker counts from its start to its end, also while it drains or sleeps: its accelerators are not free before. Nothing is
# drained for the budget alone. With prices that are numbers of accelerators the budget is one of accelerators; a price that
# is not given counts as 1, so that without prices the budget is a number of workers.

_ROUNDING = 1e-9


class SharedBudget:
    def __init__(self, most: float, order: Sequence[str] = ()) -> None:
        """`most`: cost in all, 0 = unlimited. `order`: pools or models, the first one first; others come after them alike."""
        self._most = most or inf
        self._order = {name: place for place, name in enumerate(order)}

    def rank(self, plan: Plan) -> int:
        return min(self._order.get(plan.pool, len(self._order)), self._order.get(plan.model, len(self._order)))

    def divide(self, plans: Sequence[Plan], held: Mapping[str, int]) -> list[Plan]:
        """Return the plans, in their order, with the starts that the budget has room for.

        `held`: workers by pool, in any state.
        Pools of one rank take turns, the one with the fewest starts so far first, so that none takes all.
        """
        left = self._most - sum(_price(plan) * held.get(plan.pool, 0) for plan in plans)
        asked = {plan.pool: sum(action.kind == "start" for action in plan.actions) for plan in plans}
        given = dict.fromkeys(asked, 0)
        for rank in sorted({self.rank(plan) for plan in plans}):
            peers = [plan for plan in plans if self.rank(plan) == rank]
            while able := [plan for plan in peers if given[plan.pool] < asked[plan.pool] and _price(plan) <= left + _ROUNDING]:
                chosen = min(able, key=lambda plan: (given[plan.pool], plan.pool))
                given[chosen.pool] += 1
                left -= _price(chosen)
        return [_with_starts(plan, given[plan.pool]) if given[plan.pool] < asked[plan.pool] else plan for plan in plans]


def _price(plan: Plan) -> float:
    return plan.price if plan.price > 0 else 1.0


def _with_starts(plan: Plan, starts: int) -> Plan:
    kept, desired = [], dict(plan.desired)
    for action in plan.actions:
        if action.kind != "start":
            kept.append(action)
        elif starts > 0:
            kept.append(action)
            starts -= 1
        else:
            desired[action.role] -= 1
    return msgspec.structs.replace(plan, reason="over_budget", actions=tuple(kept), desired=desired)
