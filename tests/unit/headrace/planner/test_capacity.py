from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.capacity import (
    Capacity,
    Demand,
    Need,
    Shape,
    Speed,
    Targets,
    batch_workers,
    capacity_of,
    late_share,
    need_by_slots,
    need_of,
    workers_for,
)
from headrace.planner.forecast import Forecast

SPEED = Speed(base_s=0.01, prefill_s=1e-4, decode_s=1e-3, context_s=0.0)
SHAPE = Shape(prompt=1000, uncached=1000, output=100, long=2000)
TARGETS = Targets(ttft_s=2.0, itl_s=0.05)


def test_decode_is_bounded_by_the_time_between_tokens() -> None:
    found = capacity_of("decode", SPEED, SHAPE, TARGETS)
    assert found.sequences == 40  # 10 ms and 1 ms for each
    assert abs(found.per_s - 40 / (100 * 0.05)) < 1e-9


def test_decode_is_bounded_by_slots_and_by_the_kv_cache() -> None:
    assert capacity_of("decode", SPEED, SHAPE, TARGETS, slots=8, kv_tokens=0).sequences == 8
    assert capacity_of("decode", SPEED, SHAPE, TARGETS, slots=0, kv_tokens=5250).sequences == 5


def test_prompts_take_their_share_of_an_aggregated_worker() -> None:
    both = capacity_of("aggregated", SPEED, SHAPE, TARGETS)
    assert both.per_s < capacity_of("decode", SPEED, SHAPE, TARGETS).per_s
    assert both.per_s < 1 / 0.1


def test_longer_context_slows_decode() -> None:
    slow = Speed(base_s=0.01, prefill_s=1e-4, decode_s=1e-3, context_s=1e-6)
    assert capacity_of("decode", slow, SHAPE, TARGETS).per_s < capacity_of("decode", SPEED, SHAPE, TARGETS).per_s


def test_a_prompt_that_alone_is_later_than_the_target_makes_no_negative_target_and_no_unbounded_growth() -> None:
    long = Shape(prompt=60_000, uncached=60_000, output=10, long=90_000)
    for found in (
        capacity_of("prefill", SPEED, long, TARGETS),
        capacity_of("aggregated", SPEED, long, TARGETS, slots=64, kv_tokens=0),
    ):
        assert not found.reachable
        assert found.slack_s > 0
        assert workers_for(0.5 * found.per_s, found, TARGETS, most=1000) <= 8
        assert workers_for(10 * found.per_s, found, TARGETS, most=1000) <= 30


def test_a_step_that_alone_is_later_than_the_target_is_told() -> None:
    found = capacity_of("decode", Speed(base_s=0.2), SHAPE, TARGETS, slots=16, kv_tokens=0)
    assert not found.reachable
    assert found.per_s > 0


def test_no_requests_need_no_workers() -> None:
    found = capacity_of("prefill", SPEED, SHAPE, TARGETS)
    assert workers_for(0.0, found, TARGETS, most=5) == 0
    assert workers_for(float("nan"), found, TARGETS, most=5) == 0


speeds = st.builds(
    Speed,
    base_s=st.floats(1e-4, 0.5),
    prefill_s=st.floats(1e-6, 1e-2),
    decode_s=st.floats(1e-6, 1e-2),
    context_s=st.floats(0, 1e-6),
)
shapes = st.builds(
    Shape, prompt=st.floats(0, 1e5), uncached=st.floats(0, 1e5), output=st.floats(0, 1e4), long=st.floats(0, 2e5)
)
target = st.builds(Targets, ttft_s=st.floats(0.001, 60), itl_s=st.floats(0.001, 1), miss=st.floats(0.0001, 0.5))


@given(speeds, shapes, target, st.integers(0, 512), st.integers(0, 10**7), st.floats(0, 1e4))
def test_whatever_the_figures_more_load_never_needs_fewer_workers(
    speed: Speed, shape: Shape, targets: Targets, slots: int, kv: int, rate: float
) -> None:
    for found in (
        capacity_of("prefill", speed, shape, targets),
        capacity_of("decode", speed, shape, targets, slots=slots, kv_tokens=kv),
        capacity_of("aggregated", speed, shape, targets, slots=slots, kv_tokens=kv),
    ):
        assert found.per_s > 0
        assert found.sequences >= 1
        few = workers_for(rate, found, targets, most=50)
        assert 0 <= few <= workers_for(rate * 1.5, found, targets, most=50) <= 50


@given(st.integers(1, 30), st.floats(0.1, 100), shapes, target)
def test_more_workers_are_never_later(workers: int, rate: float, shape: Shape, targets: Targets) -> None:
    found = capacity_of("prefill", SPEED, shape, targets)
    assert 0 <= late_share(workers + 1, rate, found) <= late_share(workers, rate, found) + 1e-9 <= 1 + 1e-9


CAPACITY = Capacity(per_s=2.0, sequences=32, slack_s=1.0)
DEFAULT_TARGETS = Targets()


def need(*, supply: int = 1, ready: int = 1, capacity: Capacity = CAPACITY, **kw: object) -> Need:
    values = {"rate": 0.0, "forecast": None, "waiting": 0, "wait_s": None, **kw}
    return need_of(Demand(**values), capacity, DEFAULT_TARGETS, supply=supply, ready=ready, most=50)  # type: ignore[arg-type]


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


backlogs = st.lists(st.tuples(st.floats(-100, 1e5), st.integers(0, 10_000)), max_size=10)


def test_the_tightest_deadline_counts_with_all_that_is_due_before_it() -> None:
    # 100 in 110 s and 1000 in 1010 s, with 10 s to start and one a second: 1.0 and 1.1
    assert batch_workers([(110, 100), (1010, 1000)], per_s=1.0, start_s=10, awake=True) == 2
    assert batch_workers([(110, 100), (1010, 900)], per_s=1.0, start_s=10, awake=True) == 1


def test_work_sleeps_until_it_is_worth_a_start() -> None:
    assert batch_workers([(1000, 400)], per_s=1.0, start_s=0, awake=False) == 0
    assert batch_workers([(1000, 400)], per_s=1.0, start_s=0, awake=True) == 1
    assert batch_workers([(1000, 900)], per_s=1.0, start_s=0, awake=False) == 1


def test_work_that_is_late_already_is_finite() -> None:
    assert batch_workers([(-5, 10)], per_s=1.0, start_s=60, awake=True) == 10


def test_no_backlog_needs_nobody() -> None:
    assert batch_workers([], per_s=1.0, start_s=60, awake=True) == 0


@given(backlogs, st.floats(0.01, 100), st.floats(0, 600))
def test_those_that_are_required_meet_every_deadline(backlog: list[tuple[float, int]], per_s: float, start_s: float) -> None:
    workers = batch_workers(backlog, per_s=per_s, start_s=start_s, awake=True)
    done = 0
    for left_s, count in sorted(backlog):
        done += count
        assert done <= workers * per_s * max(left_s - start_s, 1.0) * (1 + 1e-6) + 1e-6
