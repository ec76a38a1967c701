"""A plan: numbers of workers, actions and exactly one named reason; victims, the order of actions, and the shared budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Literal, get_args

import msgspec

from headrace.planner.observe import ROLES, Observation, WorkerSight

# Decides what may leave: a what-if of the load on fewer workers, and the workers with the least held work.

ROOM = 0.85  # of slots and KV blocks that the rest may be filled to


def most_leaving(workers: Sequence[WorkerSight], leave: int, *, waiting: int, sequences: int) -> int:
    """Return how many of at most `leave` serving workers can go, so that all that is held and waits fits on the rest.

    `sequences`: those that one may decode at once within its target. Where a load is unknown, nothing may leave.
    """
    if any(one.report_age_s is None for one in workers):
        return 0
    held = sum(one.held for one in workers) + waiting
    limit = min((min(one.slots or sequences, sequences) for one in workers), default=sequences)
    used = sum(one.kv_used for one in workers if one.kv_used is not None)
    for gone in range(min(leave, len(workers)), 0, -1):
        rest = len(workers) - gone
        if held <= ROOM * rest * limit and used / rest <= ROOM if rest else not held:
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


Reason = Literal[  # where roles differ, the first of these that any of them has stands for the tick
    "workers_unknown",  # the members could not be read: nothing is decided
    "load_stale",  # too few workers have reported lately: nothing is decided
    "over_budget",  # more are needed than all pools together may cost
    "role_shift",  # a role has too many and another one too few
    "below_minimum",
    "from_zero",  # requests wait, and no worker is there or on its way
    "batch_deadline",
    "backlog",  # more are needed to clear what waits
    "waits_late",  # requests wait longer than they may, though the rates say that there are enough
    "slots_full",  # nothing is known of speeds yet, and the workers are full
    "forecast",  # more are needed when a worker that is started now can serve
    "peak_kept",  # bursts come sooner than a worker can start: as many as the highest load of the day needs stay
    "at_maximum",  # more are needed than are allowed
    "idle",  # nothing has arrived for so long that none is needed
    "surplus",
    "would_not_fit",  # fewer would do, but what they hold does not fit on the rest
    "arrivals_unknown",  # what arrives now is not known: no worker may leave
    "starting",  # those that are on their way are enough
    "settling",  # fewer would do, but the last start is too young, or the need was higher a moment ago
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


# Divides what all pools together may cost: what is there counts first, then starts in the order of the pools' priority.
#
# A worker counts from its start to its end, also while it drains or sleeps: its accelerators are not free before. Nothing is
# drained for the budget alone. With prices that are numbers of accelerators the budget is one of accelerators; a price that
# is not given counts as 1, so that without prices the budget is a number of workers.

_ROUNDING = 1e-9


def within_budget(plans: Sequence[Plan], held: Mapping[str, int], most: float, order: Sequence[str] = ()) -> list[Plan]:
    """Return the plans, in their order, with the starts that the budget has room for.

    `held`: workers by pool, in any state. `most`: cost in all, 0 = unlimited. `order`: pools or models, the first one first;
    others come after them alike. Pools of one rank take turns, the one with the fewest starts so far first, so that none
    takes all.
    """
    ranks = {name: place for place, name in enumerate(order)}
    price = {plan.pool: plan.price if plan.price > 0 else 1.0 for plan in plans}
    rank = {plan.pool: min(ranks.get(name, len(ranks)) for name in (plan.pool, plan.model)) for plan in plans}
    left = (most or inf) - sum(price[pool] * held.get(pool, 0) for pool in price)
    asked = {plan.pool: sum(action.kind == "start" for action in plan.actions) for plan in plans}
    given = dict.fromkeys(asked, 0)
    while able := [pool for pool in asked if given[pool] < asked[pool] and price[pool] <= left + _ROUNDING]:
        chosen = min(able, key=lambda pool: (rank[pool], given[pool], pool))
        given[chosen] += 1
        left -= price[chosen]
    return [_with_starts(plan, given[plan.pool]) if given[plan.pool] < asked[plan.pool] else plan for plan in plans]


def _with_starts(plan: Plan, starts: int) -> Plan:
    kept, desired = [], dict(plan.desired)
    for action in plan.actions:
        if action.kind != "start" or starts > 0:
            kept.append(action)
            starts -= action.kind == "start"
        else:
            desired[action.role] -= 1
    return msgspec.structs.replace(plan, reason="over_budget", actions=tuple(kept), desired=desired)
