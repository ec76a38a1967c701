"""The choice of `KvPolicy` for many requests or workers, in few operations on whole arrays.

What a request would cost is computed for all workers, because one without room may be worth waiting for; preference only for
those that have room, which are few while much waits.  The choice is that of `KvPolicy` with all costs (`array_costs.py`) to the
last bit: `tests/unit/router/placement/costs/test_scalar_choice.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.router.placement.costs.cost_matrix import CostMatrix
from headrace.router.placement.costs.scalar_choice import DEADLINE_MARGIN_S, OUT_OF_TURN_S, PRIORITY_S, ScalarChoice
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting
from headrace.router.placement.worker_view import Floats, Ints, WorkerView


def applies(workers: WorkerView, settings: SchedulerSettings) -> bool:
    """Return whether `choose` may be used: no prefill workers, and no temperature."""
    return workers.prefill is None and settings.temperature <= 0


def choose(
    group: Sequence[Waiting],
    window: CostMatrix,
    workers: WorkerView,
    congestion: float,
    now_s: float,
    settings: SchedulerSettings,
) -> ScalarChoice:
    """Choose a request and its worker exactly as `KvPolicy.pick` does with all costs."""
    roomy = np.flatnonzero(workers.room)
    if not len(roomy):
        return ScalarChoice()
    rows = window.numbers(group)
    every = np.arange(len(rows))
    blocks, eligible = window.blocks[rows], window.eligible[rows]
    service, cost = window.spare(len(rows))
    np.take(window.work, rows, axis=0, out=service, mode="clip")  # which needs no copy of `out`; no row is beyond the end
    service *= workers.token_s
    service += workers.step_s
    np.multiply(service, 1.0 + congestion, out=cost)
    cost += workers.wait_s
    anywhere = bool(eligible.all())
    if not anywhere:
        cost[~eligible] = np.inf
    best = cost.argmin(axis=1)
    choice = _preferences(cost, service, roomy, workers)
    fits = bool(blocks.max() <= workers.blocks_free[roomy].min())
    if not (anywhere and fits):  # seldom, and each look at all pairs counts
        free = eligible[:, roomy] & (blocks[:, None] <= workers.blocks_free[roomy])
        choice[~free] = np.inf
    mine = choice.argmin(axis=1)
    possible = np.isfinite(choice[every, mine])
    column = roomy[mine]
    here = cost[every, column]
    age = now_s - window.arrived[rows]
    aged = (age > settings.max_wait_s) | (window.deadline[rows] - now_s < here + DEADLINE_MARGIN_S)
    open_ = workers.room[best] & eligible[every, best] & (blocks <= workers.blocks_free[best])
    waits = ~open_ & (cost[every, best] < here - 1e-9) & ~aged
    passed_up = bool((possible & waits).any())
    possible &= ~waits
    if not possible.any():
        return ScalarChoice(passed_up=passed_up)
    score = window.work[rows, column] * workers.token_s[column] - settings.ageing * age
    score += window.priority[rows] * PRIORITY_S
    score[aged] -= OUT_OF_TURN_S + age[aged]
    score[~possible] = np.inf
    at = int(score.argmin())
    return ScalarChoice(at, int(column[at]), float(here[at]), bool(aged[at]), passed_up)


def _preferences(cost: Floats, service: Floats, roomy: Ints, workers: WorkerView) -> Floats:
    """Return what is compared of the workers with room, a column for each. `service` may be lost by it."""
    if len(roomy) == cost.shape[1]:  # then nothing has to be copied
        preferred = service
    else:
        preferred, cost = service[:, roomy], cost[:, roomy]
    preferred *= workers.unevenness[roomy] - 1.0 + workers.disturbed[roomy]
    preferred += cost
    return preferred
