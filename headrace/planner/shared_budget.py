"""Divides what all pools together may cost: what is there counts first, then starts in the order of the pools' priority.

A worker counts from its start to its end, also while it drains or sleeps: its accelerators are not free before. Nothing is
drained for the budget alone. With prices that are numbers of accelerators the budget is one of accelerators; a price that is
not given counts as 1, so that without prices the budget is a number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from headrace.planner.plan import Plan

_ROUNDING = 1e-9


class SharedBudget:
    """The budget of a deployment."""

    def __init__(self, most: float, order: Sequence[str] = ()) -> None:
        """`most`: cost in all, 0 = unlimited. `order`: pools or models, the first one first; others come after them alike."""
        self._most = most or inf
        self._order = {name: place for place, name in enumerate(order)}

    def rank(self, plan: Plan) -> int:
        """Return the place of a pool among the others."""
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
    """Return a plan with only its first starts."""
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
