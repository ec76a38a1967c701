"""Defines what a tick of the planner comes to: numbers of workers, what to do, and exactly one named reason."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from headrace.planner.actions import Action

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
