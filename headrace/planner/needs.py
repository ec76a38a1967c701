"""Derives how many workers of a role are needed now: by forecast, by what waits, and by batch deadlines."""

from __future__ import annotations

from math import ceil

import msgspec

from headrace.planner.batch_deadlines import batch_workers
from headrace.planner.capacity import FULL, Capacity, Targets, workers_for
from headrace.planner.forecast_book import Forecast
from headrace.planner.plan import Reason

HARDLY_ANY = 1.0  # request that is expected within the horizon: with less a pool without workers stays so


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a pool: `rate` a second lately, `forecast`, `waiting` requests, their late waits, and batch work."""

    rate: float
    forecast: Forecast | None
    waiting: int
    wait_s: float | None  # 95 % quantile of the waits lately
    backlog: tuple[tuple[float, int], ...] = ()
    idle: bool = False  # nothing has arrived for long
    start_s: float = 60.0
    kept: float = 0.0  # load that workers are kept for whatever is forecast, 0 = none


class Need(msgspec.Struct, frozen=True):
    """A number of workers, and what asks for it."""

    workers: int
    reason: Reason


def need_of(demand: Demand, capacity: Capacity, targets: Targets, *, supply: int, ready: int, most: int) -> Need:
    """Return the need by known speeds. `supply`: workers that serve or are on their way, `ready`: those that serve."""
    expected = demand.forecast.value if demand.forecast is not None else demand.rate
    high = max(demand.forecast.high if demand.forecast is not None else 0.0, demand.rate)
    if demand.kept:
        high = min(high, max(demand.kept, demand.rate))
    if demand.idle and not demand.waiting and expected * demand.start_s < HARDLY_ANY:
        needs = [Need(0, "idle")]
    else:
        needs = [Need(max(1, workers_for(high, capacity, targets, most=most + 1)), "forecast")]
        needs.append(Need(workers_for(demand.kept, capacity, targets, most=most + 1), "peak_kept"))
    needs.append(
        Need(batch_workers(demand.backlog, per_s=capacity.per_s, start_s=demand.start_s, awake=supply > 0), "batch_deadline")
    )
    if demand.waiting and not supply:
        needs.insert(0, Need(1, "from_zero"))
    if demand.waiting > max(1, ready) * capacity.per_s * capacity.slack_s:  # some of them will have waited too long
        clear_s = max(demand.start_s, targets.ttft_s)
        needs.append(Need(ceil((demand.rate + demand.waiting / clear_s) / (FULL * capacity.per_s)), "backlog"))
    late = demand.wait_s is not None and demand.wait_s > capacity.slack_s
    if late and supply == ready and needs[0].workers <= supply:
        needs.append(Need(supply + 1, "waits_late"))
    best = max(needs, key=lambda need: need.workers)
    return Need(min(best.workers, most + 1), best.reason)


def need_by_slots(demand: Demand, *, held: int, slots: int, supply: int, ready: int) -> Need:
    """Return the need while no speed is known: one more when the workers are full, none less."""
    if demand.waiting and not supply:
        return Need(1, "from_zero")
    if demand.idle and not held and not demand.waiting and not demand.backlog:
        return Need(0, "idle")
    if supply == ready and ready and demand.waiting and (not slots or held >= FULL * slots):
        return Need(supply + 1, "slots_full")
    return Need(max(1, supply), "steady")
