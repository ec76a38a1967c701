from __future__ import annotations

from math import isfinite, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.forecasters import Holt, LastValue, LocalTrend, Mean, SameTimeYesterday, ahead, counted, forecasters

values = st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=60)


@given(values, st.integers(-5, 500))
def test_every_forecast_is_finite_and_never_negative(series: list[float | None], steps: int) -> None:
    for model in forecasters(24):
        for value in series:
            model.update(value)
        guess = model.predict(steps)
        assert guess is None or (isfinite(guess) and guess >= 0), model.name


@given(st.lists(st.none(), max_size=20))
def test_nothing_known_is_no_forecast_of_zero(series: list[float | None]) -> None:
    for model in forecasters(24):
        for value in series:
            model.update(value)
        assert model.predict(3) is None, model.name


def test_a_forecast_is_never_of_the_past() -> None:
    assert [ahead(steps) for steps in (-3, 0, 1, 7)] == [1, 1, 1, 7]
    rising = LocalTrend()
    for value in range(50):
        rising.update(float(value))
    assert rising.predict(-10) == rising.predict(1)


def test_no_number_is_no_forecast() -> None:
    assert counted(float("nan")) is None
    assert counted(float("inf")) is None
    assert counted(-3.0) == 0.0


def test_the_trend_is_carried_on() -> None:
    for model in (Holt(), LocalTrend()):
        for value in range(60):
            model.update(float(value))
        guess = model.predict(5)
        assert guess is not None
        assert 60 < guess <= 65, model.name


def test_yesterday_is_the_value_one_season_before_the_time_that_is_asked_about() -> None:
    model = SameTimeYesterday(24)
    series = [10 + 5 * sin(i / 24 * 6.283) for i in range(48)]
    for value in series:
        model.update(value)
    assert model.predict(6) == pytest.approx(sum(series[47 + 6 - 24 + d] for d in (-1, 0, 1)) / 3)
    assert model.predict(30) == model.predict(6)


def test_yesterday_says_nothing_on_the_first_day() -> None:
    model = SameTimeYesterday(24)
    for _ in range(12):
        model.update(5.0)
    assert model.predict(3) is None


def test_an_unknown_value_teaches_nothing() -> None:
    for model in (LastValue(), Mean()):
        model.update(4.0)
        model.update(None)
        assert model.predict(1) == 4.0
