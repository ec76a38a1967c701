"""Defines the Prometheus metrics of the planner."""

from __future__ import annotations

from headrace.base.metrics import Counter, Gauge
from headrace.planner.plan import REASONS, Plan

DESIRED = Gauge("headrace_planner_desired_workers", "Workers that the planner wants", ["pool", "role"])
SUPPLY = Gauge("headrace_planner_supply_workers", "Workers that serve or are on their way", ["pool", "role"])
NEEDED = Gauge("headrace_planner_needed_workers", "Workers that the load needs, before bounds and hysteresis", ["pool", "role"])
CAPACITY = Gauge(
    "headrace_planner_capacity_requests_per_second", "Requests that one worker takes within targets", ["pool", "role"]
)
RATE = Gauge("headrace_planner_arrivals_per_second", "Requests that arrived lately", ["pool"])
FORECAST = Gauge(
    "headrace_planner_forecast_per_second",
    "Requests expected when a worker that is started now can serve; `bound`: low, value, high",
    ["pool", "bound"],
)
CONFIDENCE = Gauge("headrace_planner_confidence", "Quantile of the forecast that workers are planned for", ["pool"])
START_S = Gauge("headrace_planner_start_seconds", "90 % quantile of what starting a worker took", ["pool"])
TICKS = Counter("headrace_planner_ticks_total", "Decisions, by their one reason", ["pool", "reason"])
ACTIONS = Counter("headrace_planner_actions_total", "Actions by kind and by what became of them", ["kind", "outcome"])
LOST_STARTS = Gauge("headrace_planner_lost_starts", "Starts that were asked for and never became a worker", ["pool"])
FAILED_FORECASTS = Gauge("headrace_planner_failed_forecasts", "Forecasters that raised", ["pool", "forecaster"])
FORECAST_LOSS = Gauge(
    "headrace_planner_forecast_loss",
    "Mean loss of a forecaster at the horizon, in square roots of requests a second: the least one's is used",
    ["pool", "forecaster"],
)
LEADING = Gauge("headrace_planner_leading", "1 while this process decides")


def show(plan: Plan) -> None:
    """Show a plan."""
    pool = plan.pool
    for role, count in plan.desired.items():
        DESIRED.labels(pool, role).set(count)
        SUPPLY.labels(pool, role).set(plan.supply.get(role, 0))
    for role, count in plan.needed.items():
        NEEDED.labels(pool, role).set(count)
    for role, per_s in plan.capacity.items():
        CAPACITY.labels(pool, role).set(per_s)
    if plan.rate is not None:
        RATE.labels(pool).set(plan.rate)
    for bound, value in (("low", plan.forecast_low), ("value", plan.forecast), ("high", plan.forecast_high)):
        if value is not None:
            FORECAST.labels(pool, bound).set(value)
    CONFIDENCE.labels(pool).set(plan.confidence)
    START_S.labels(pool).set(plan.start_s)
    TICKS.labels(pool, plan.reason).inc()


def declare(pool: str) -> None:
    """Have every reason as a series from the beginning, so that a rate of it can be asked for."""
    for reason in REASONS:
        TICKS.labels(pool, reason)
