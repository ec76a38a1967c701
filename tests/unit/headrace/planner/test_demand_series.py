from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.demand_series import DemandSeries


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
    stored = series.dump()["values"]
    assert isinstance(stored, bytes)
    assert again.load(10, series.open_s, stored)
    assert list(again.values) == [2.0]
    assert not other.load(10, series.open_s, stored)
    assert not other.values
