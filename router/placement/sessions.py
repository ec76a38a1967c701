"""A request of a session goes where the session was before, within reason."""

from __future__ import annotations

import numpy as np

from router.placement.policies import Pick, is_remote
from router.placement.settings import SchedulerSettings
from router.placement.ways import costs
from router.placement.window import Row, Window
from router.placement.workers import Workers


def prefer_session(row: Row, pick: Pick, window: Window, workers: Workers, settings: SchedulerSettings) -> tuple[int, bool]:
    """The session's own worker, if it has room and costs little more; and whether the prompt is computed elsewhere."""
    column = row.session
    if column < 0 or column == pick.column or not (workers.all_room[column] or workers.prefill is not None):
        return pick.column, pick.remote
    table = costs(window, np.array([row.number]), workers, 0.0, settings)
    if not table.free[0, column]:
        return pick.column, pick.remote
    own, best = float(table.here[0, column]), float(table.here[0, pick.column])
    if own <= best * (1.0 + settings.session_slack):
        return column, is_remote(table, 0, column)
    return pick.column, pick.remote
