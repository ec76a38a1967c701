from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner.capacity import Capacity, Targets
from headrace.planner.forecast import Forecast
from headrace.planner.needs import (
    AIM,
    FIRST_OUTPUT,
    HIGHEST,
    LOWEST,
    MARGIN,
    MOST_UP,
    Demand,
    DemandSeries,
    Hysteresis,
    LiveConfidence,
    Need,
    PeakKeeper,
    RecentRequests,
    Rehearsal,
    batch_workers,
    need_by_slots,
    need_of,
    required,
)
from headrace.planner.observe import OutcomeSight, RequestSight
from tests.support.planner_sights import BEGAN, seen

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


backlogs = st.lists(st.tuples(st.floats(-100, 1e5), st.integers(0, 10_000)), max_size=10)


def test_the_tightest_deadline_counts_with_all_that_is_due_before_it() -> None:
    # 100 in 110 s and 1000 in 1010 s, with 10 s to start and one a second: 1.0 and 1.1
    assert required([(110, 100), (1010, 1000)], per_s=1.0, start_s=10) == 1.1


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


def test_arrivals_become_a_rate_per_step() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    assert series.add(20, since_s=100, until_s=110) == [2.0]
    assert series.add(5, since_s=110, until_s=115) == []
    assert series.add(5, since_s=115, until_s=120) == [1.0]


def test_a_step_that_nobody_watched_is_unknown_and_not_zero() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(10, since_s=100, until_s=110)
    assert series.add(None, since_s=110, until_s=130) == [None, None]
    assert series.known(3) == [1.0]


def test_a_step_without_arrivals_that_was_watched_is_zero() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    assert series.add(0, since_s=100, until_s=120) == [0.0, 0.0]


def test_a_clock_that_goes_back_changes_nothing() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(10, since_s=100, until_s=110)
    assert series.add(50, since_s=110, until_s=90) == []
    assert list(series.values) == [1.0]


def test_a_negative_count_is_no_arrival() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    assert series.add(-5, since_s=100, until_s=110) == [0.0]


def test_what_is_older_than_the_series_is_forgotten() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(10, since_s=100, until_s=110)
    assert series.add(10, since_s=110, until_s=100_000) == []
    assert not series.known(100)


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 40)), min_size=1, max_size=40))
def test_no_arrival_is_lost_or_counted_twice(ticks: list[tuple[int, float]]) -> None:
    series = DemandSeries(step_s=10, keep_s=10_000)
    at, total = 1000.0, 0
    for count, took in ticks:
        series.add(count, since_s=at, until_s=at + took)
        at, total = at + took, total + count
    series.add(0, since_s=at, until_s=at + 10)
    at += 10
    assert abs(sum(value for value in series.values if value is not None) * 10 - total) <= total * 0.5 + 1e-6
    assert series.open_s is not None
    assert series.open_s <= at < series.open_s + 10


def test_a_stored_series_is_taken_over_and_one_of_other_steps_is_not() -> None:
    series = DemandSeries(step_s=10, keep_s=100)
    series.add(20, since_s=100, until_s=110)
    again, other = DemandSeries(step_s=10, keep_s=100), DemandSeries(step_s=5, keep_s=100)
    again.load(series.dump())
    assert list(again.values) == [2.0]
    other.load(series.dump())
    assert not other.values


def test_no_request_has_no_shape() -> None:
    assert RecentRequests().shape is None


def test_the_shape_has_means_and_a_long_request() -> None:
    recent = RecentRequests()
    placed = tuple(RequestSight(prompt=100 * i, uncached=50 * i) for i in range(1, 21))
    recent.note(seen(0, placed=placed))
    shape = recent.shape
    assert shape is not None
    assert (shape.prompt, shape.uncached, shape.long, shape.output) == (1050, 525, 950, FIRST_OUTPUT)
    recent.note(seen(1, outputs=(10, 30)))
    assert recent.shape is not None
    assert recent.shape.output == 20


def test_waits_are_a_quantile_and_nothing_of_too_few() -> None:
    recent = RecentRequests()
    recent.note(seen(0, placed=tuple(RequestSight(prompt=1, uncached=1, waited_s=float(i)) for i in range(20))))
    assert recent.wait_s(0.95, since_s=BEGAN) == 19.0
    assert recent.wait_s(0.95, since_s=BEGAN + 1) is None


def test_lengths_that_cannot_be_are_ignored() -> None:
    recent = RecentRequests()
    recent.note(seen(0, placed=(RequestSight(prompt=-1, uncached=0), RequestSight(prompt=5, uncached=9)), outputs=(-4,)))
    assert recent.shape is not None
    assert (recent.shape.prompt, recent.shape.uncached, recent.shape.output) == (5, 5, FIRST_OUTPUT)


def test_lengths_are_stored_and_taken_over() -> None:
    recent, again = RecentRequests(), RecentRequests()
    recent.note(seen(0, placed=(RequestSight(prompt=7, uncached=3),), outputs=(4,)))
    again.load(recent.dump())
    assert again.shape == recent.shape


LIVE_CONFIDENCE_TARGETS = Targets(ttft_s=2.0, itl_s=0.1, miss=0.01)
GOOD = OutcomeSight(ttft_s=1.0, itl_s=0.05)
LATE = OutcomeSight(ttft_s=2.5, itl_s=0.05)
SLOW = OutcomeSight(ttft_s=1.0, itl_s=0.2)


def confidence(first: float = 0.8, *, moves: bool = True, targets: Targets = LIVE_CONFIDENCE_TARGETS) -> LiveConfidence:
    return LiveConfidence(first, targets, moves=moves)


def test_requests_that_are_late_or_slow_make_it_higher_and_none_makes_it_lower() -> None:
    for missed in (LATE, SLOW):
        some = confidence()
        for _ in range(50):
            some.note([missed, *[GOOD] * 19])
        assert some.value > 0.82
    some = confidence()
    for _ in range(500):
        some.note([GOOD] * 20)
    assert some.value < 0.75


def test_it_stays_where_as_many_are_late_as_it_aims_at() -> None:
    some, rng = confidence(), random.Random(1)
    for _ in range(2000):
        some.note([LATE if rng.random() < AIM * LIVE_CONFIDENCE_TARGETS.miss else GOOD for _ in range(10)])
    assert abs(some.value - 0.8) < 0.05


def test_it_settles_where_fewer_are_late_than_may_be() -> None:
    """A load of which a share of 10 % and more is late below 0.9, and hardly anything above."""
    some, rng, late = confidence(0.6), random.Random(2), 0
    for look in range(6000):
        share = 0.1 * max(0.0, 0.9 - some.value)
        ended = [LATE if rng.random() < share else GOOD for _ in range(10)]
        late += ended.count(LATE) if look >= 3000 else 0
        some.note(ended)
    assert late / 30_000 < LIVE_CONFIDENCE_TARGETS.miss
    assert 0.75 < some.value < 0.9


def test_a_burst_adds_no_more_than_one_look_may() -> None:
    some = confidence()
    some.note([LATE] * 500)
    assert some.value <= 0.8 + MOST_UP + 1e-9


def test_where_more_may_be_late_it_takes_more_of_them() -> None:
    strict, lenient = confidence(), confidence(targets=Targets(ttft_s=2.0, itl_s=0.1, miss=0.1))
    for _ in range(100):
        for some in (strict, lenient):
            some.note([LATE, *[GOOD] * 29])
    assert strict.value > 0.8
    assert lenient.value < 0.8


def test_one_that_does_not_move_is_what_was_set() -> None:
    some = confidence(0.85, moves=False)
    assert not some.note([LATE] * 100)
    some.load({"value": 0.6})
    assert some.value == 0.85


@given(
    st.floats(0.5, 0.999),
    st.lists(st.lists(st.sampled_from([GOOD, LATE, SLOW]), max_size=40), max_size=300),
)
def test_it_never_leaves_its_bounds_and_says_when_it_changes(first: float, looks: list[list[OutcomeSight]]) -> None:
    some = confidence(first)
    for ended in looks:
        before = some.value
        changed = some.note(ended)
        assert changed == (some.value != before)
        assert min(LOWEST, first) <= some.value <= max(HIGHEST, first)


def test_a_stored_value_is_taken_over_and_one_that_cannot_be_is_not() -> None:
    some = confidence()
    some.load({"value": 0.9})
    assert some.value == 0.9
    for wrong in (0.0, 1.5, float("nan")):
        some.load({"value": wrong})
        assert some.value == 0.9


ONE = Capacity(per_s=4.0, sequences=16, slack_s=3.0)
PEAK_KEEPER_TARGETS = Targets(ttft_s=4.0, itl_s=0.25)


def keeper() -> PeakKeeper:
    return PeakKeeper(PEAK_KEEPER_TARGETS, season_s=86_400.0)


def pass_steps(some: PeakKeeper, rate: float | None, count: int, *, start_s: float) -> None:
    for _ in range(count):
        some.note(rate, ONE, step_s=5.0, start_s=start_s, most=20)


def end(some: PeakKeeper, *, late: int, others: int) -> None:
    """Have so many requests end late, one half at the first token and one between tokens, and so many in time."""
    some.note_ended([OutcomeSight(ttft_s=9.0)] * (late // 2) + [OutcomeSight(ttft_s=0.1, itl_s=9.0)] * (late - late // 2))
    some.note_ended([OutcomeSight(ttft_s=0.1)] * others)


def bursts(some: PeakKeeper, *, start_s: float, late: int = 40) -> None:
    """Pass two hours with a burst in each that rises within two minutes, and so many late ones of 2,000 requests."""
    end(some, late=late, others=2000 - late)
    for _ in range(2):
        pass_steps(some, 1.0, 480, start_s=start_s)
        for step in range(24):
            pass_steps(some, 1.0 + 11.0 * step / 24, 1, start_s=start_s)
        pass_steps(some, 12.0, 120, start_s=start_s)


def test_the_peak_is_kept_where_bursts_come_sooner_than_workers_and_not_where_these_are_quick() -> None:
    slow, quick = keeper(), keeper()
    bursts(slow, start_s=300.0)
    bursts(quick, start_s=10.0)
    assert slow.rate == pytest.approx(MARGIN * 12.0)
    assert quick.rate == 0.0


def test_bursts_that_forecasts_foresee_keep_nothing() -> None:
    some = keeper()
    bursts(some, start_s=300.0, late=15)
    assert some.rate == 0.0


def test_many_requests_that_really_are_late_are_enough_and_keeping_ends_long_after() -> None:
    some = keeper()
    pass_steps(some, 3.0, 10, start_s=10.0)
    end(some, late=62, others=1938)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert some.keeping
    end(some, late=0, others=16_000)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert some.keeping, "a ninth of the limit"
    end(some, late=0, others=4000)
    pass_steps(some, 3.0, 1, start_s=10.0)
    assert not some.keeping


def test_a_few_late_requests_say_nothing() -> None:
    some = keeper()
    some.note_ended([OutcomeSight(ttft_s=9.0)] * 29)
    pass_steps(some, 1.0, 5, start_s=10.0)
    assert not some.keeping


def test_a_peak_is_forgotten_after_a_day() -> None:
    some = keeper()
    bursts(some, start_s=300.0)
    pass_steps(some, 2.0, 25 * 720, start_s=300.0)
    some.keeping = True
    assert some.rate == pytest.approx(MARGIN * 2.0)


def test_an_unknown_step_changes_nothing() -> None:
    some = keeper()
    bursts(some, start_s=300.0)
    before = some.dump()
    pass_steps(some, None, 10, start_s=300.0)
    assert some.dump() == before


def test_what_is_stored_is_taken_over() -> None:
    some, other = keeper(), keeper()
    bursts(some, start_s=300.0)
    other.load(some.dump())
    assert other.rate == some.rate > 0
    for one in (some, other):
        bursts(one, start_s=300.0)
    assert other.rate == some.rate
    assert other.dump() == some.dump()
    with pytest.raises(msgspec.ValidationError):
        other.load({**some.dump(), "_peaks": []})


def test_in_the_rehearsal_workers_come_a_start_up_after_the_load_and_leave_two_later() -> None:
    pool = Rehearsal()
    for _ in range(4):
        pool.step(10.0, 3, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 1
    pool.step(10.0, 3, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 3
    for _ in range(3):
        pool.step(1.0, 1, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 3, "two start-ups are not over"
    pool.step(1.0, 1, ONE, seconds=5.0, start_s=20.0)
    assert pool.workers == 1
    assert pool.late == 0.0


def test_a_rehearsal_that_begins_amid_the_load_calls_nothing_late_before_it_has_its_workers() -> None:
    some = keeper()
    pass_steps(some, 12.0, 1000, start_s=100.0)
    assert not some.keeping


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1e4)), max_size=60), st.floats(1, 1000), st.integers(1, 30))
def test_whatever_arrives_the_kept_load_is_none_or_a_little_above_the_highest(
    rates: list[float | None], start_s: float, most: int
) -> None:
    some = keeper()
    for rate in rates:
        some.note(rate, ONE, step_s=5.0, start_s=start_s, most=most)
        highest = max((one for one in rates if one is not None), default=0.0)
        assert 0.0 <= some.rate <= MARGIN * highest * (1 + 1e-9)
        if not some.keeping:
            assert some.rate == 0.0


def test_the_most_that_was_needed_lately_counts() -> None:
    some = Hysteresis(window_s=60)
    assert some.note(5, at=0) == 5
    assert some.note(2, at=30) == 5
    assert some.note(2, at=61) == 2


def test_a_number_that_went_up_stays_for_two_start_ups() -> None:
    some = Hysteresis(window_s=60)
    assert some.may_go_down(at=0, start_s=100)
    some.went(1, at=0)
    assert not some.may_go_down(at=199, start_s=100)
    assert some.may_go_down(at=200, start_s=100)


def test_a_history_is_stored_and_taken_over() -> None:
    some, again = Hysteresis(window_s=60), Hysteresis(window_s=60)
    some.note(5, at=0)
    some.went(2, at=0)
    again.load(some.dump())
    assert again.note(1, at=10) == 5
    assert not again.may_go_down(at=10, start_s=100)
