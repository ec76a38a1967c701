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
from headrace.router.placement.worker_view import WorkerView


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
    service = window.work[rows]
    service *= workers.token_s
    service += workers.step_s
    cost = service * (1.0 + congestion)
    cost += workers.wait_s
    if not eligible.all():
        cost[~eligible] = np.inf
    taste = workers.unevenness[roomy] - 1.0 + workers.disturbed[roomy]
    free = eligible[:, roomy] & (blocks[:, None] <= workers.blocks_free[roomy])
    choice = np.where(free, cost[:, roomy] + service[:, roomy] * taste, np.inf)
    mine = choice.argmin(axis=1)
    possible = np.isfinite(choice[every, mine])
    column, best = roomy[mine], cost.argmin(axis=1)
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
