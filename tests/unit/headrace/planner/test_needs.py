from __future__ import annotations

from headrace.planner.capacity import Capacity, Targets
from headrace.planner.forecast_book import Forecast
from headrace.planner.needs import Demand, Need, need_by_slots, need_of

CAPACITY = Capacity(per_s=2.0, sequences=32, slack_s=1.0)
TARGETS = Targets()


def need(*, supply: int = 1, ready: int = 1, capacity: Capacity = CAPACITY, **kw: object) -> Need:
    values = {"rate": 0.0, "forecast": None, "waiting": 0, "wait_s": None, **kw}
    return need_of(Demand(**values), capacity, TARGETS, supply=supply, ready=ready, most=50)  # type: ignore[arg-type]


def test_the_high_end_of_the_forecast_is_planned_for() -> None:
    low = need(forecast=Forecast(value=4.0, low=3.0, high=4.0, by="last"))
    high = need(forecast=Forecast(value=4.0, low=3.0, high=12.0, by="last"))
    assert low.reason == high.reason == "forecast"
    assert high.workers > low.workers >= 3


def test_a_load_that_is_kept_asks_for_its_workers_and_forecasts_for_no_more() -> None:
    forecast = Forecast(value=4.0, low=3.0, high=40.0, by="last")
    assert need(kept=12.0).reason == "peak_kept"
    assert need(kept=12.0, forecast=forecast).workers == need(kept=12.0).workers < need(forecast=forecast).workers
    assert need(kept=12.0, rate=20.0).workers == need(rate=20.0).workers, "what is there already is above it"
    assert need(kept=12.0, idle=True) == Need(0, "idle")


def test_what_waits_is_a_need_even_if_nothing_arrives() -> None:
    assert need(waiting=1000) == Need(9, "backlog")


def test_late_waits_ask_for_one_more_but_not_while_one_is_starting() -> None:
    assert need(wait_s=5.0) == Need(2, "waits_late")
    assert need(wait_s=5.0, supply=2).workers == 1


def test_an_idle_pool_needs_none_and_a_waiting_request_wakes_it() -> None:
    assert need(idle=True) == Need(0, "idle")
    assert need(idle=True, supply=0, ready=0, waiting=1) == Need(1, "from_zero")


def test_demand_that_is_expected_wakes_an_idle_pool() -> None:
    assert need(idle=True, forecast=Forecast(value=1.0, low=0.5, high=2.0, by="yesterday")).workers >= 1


def test_batch_work_needs_workers_by_its_deadline() -> None:
    assert need(backlog=((160.0, 1000),)) == Need(5, "batch_deadline")


def test_no_need_is_far_above_what_is_allowed() -> None:
    assert need(waiting=10**9).workers == 51


def slots(**kw: object) -> Need:
    values = {"waiting": 0, "held": 0, "slots": 10, "supply": 1, "ready": 1, "idle": False, **kw}
    told = Demand(rate=0.0, forecast=None, wait_s=None, waiting=values.pop("waiting"), idle=values.pop("idle"))  # type: ignore[arg-type]
    return need_by_slots(told, **values)  # type: ignore[arg-type]


def test_while_no_speed_is_known_full_slots_ask_for_one_more_at_a_time() -> None:
    assert slots(held=10, waiting=5) == Need(2, "slots_full")
    assert slots(held=10, waiting=5, supply=2) == Need(2, "steady")
    assert slots(held=10) == Need(1, "steady")
    assert slots(supply=0, ready=0, waiting=1) == Need(1, "from_zero")
    assert slots(idle=True) == Need(0, "idle")
