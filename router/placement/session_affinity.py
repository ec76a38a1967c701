"""Session affinity: a request of a session goes to the worker that had the session before, unless that costs much more."""

from __future__ import annotations

import numpy as np

from headrace.router.placement.costs.array_costs import costs
from headrace.router.placement.costs.cost_matrix import CostMatrix, CostRow
from headrace.router.placement.policies import Pick, is_remote
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.worker_view import WorkerView


def prefer_session(
    row: CostRow, pick: Pick, window: CostMatrix, workers: WorkerView, settings: SchedulerSettings
) -> tuple[int, bool]:
    """Return the session's own worker if it has room and costs little more, else the pick; and whether the prompt is remote."""
    column = row.session
    if column < 0 or column == pick.column or not window.same_fleet(column, pick.column):
        return pick.column, pick.remote
    if not (workers.all_room[column] or workers.prefill is not None):
        return pick.column, pick.remote
    table = costs(window, np.array([row.number]), workers, 0.0, settings)
    if not table.free[0, column]:
        return pick.column, pick.remote
    own, best = float(table.here[0, column]), float(table.here[0, pick.column])
    if own <= best * (1.0 + settings.session_slack):
        return column, is_remote(table, 0, column)
    return pick.column, pick.remote
