from __future__ import annotations

import random
from math import pi, sin

from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.planner.forecast_book import ForecastBook
from headrace.planner.forecasters import LastValue, forecasters


class Broken:
    """A forecaster that raises."""

    name = "broken"

    def update(self, value: float | None) -> None:
        raise RuntimeError("no")

    def predict(self, steps: int) -> float | None:
        return 1.0


class Wild:
    """A forecaster of negative values, of which a product would be a good score."""

    name = "wild"

    def update(self, value: float | None) -> None:
        pass

    def predict(self, steps: int) -> float | None:
        return -1000.0


def book(**kw: object) -> ForecastBook:
    return ForecastBook(season=24, horizon=3, step_s=10.0, **kw)  # type: ignore[arg-type]


def test_before_anything_is_known_there_is_no_forecast() -> None:
    assert book().forecast() is None
    some = book()
    some.update(None)
    assert some.forecast() is None


def test_zero_traffic_is_forecast_as_zero_and_not_as_no_number() -> None:
    quiet = book()
    for _ in range(100):
        quiet.update(0.0)
    found = quiet.forecast()
    assert found is not None
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_the_best_forecaster_is_used_and_the_last_value_stands_until_one_is_better() -> None:
    daily = book()
    for i in range(24 * 8):
        daily.update(10 + 8 * sin(i / 24 * 2 * pi) * (1 if i % 2 else 0.3))
    assert daily.best() == "yesterday"
    flat = book()
    for _ in range(60):
        flat.update(3.0)
    assert flat.best() == "last"


def test_a_forecaster_that_raises_is_counted_and_not_used() -> None:
    some = book(models=[LastValue(), Broken()])
    with capture_logs() as logged:
        for _ in range(40):
            some.update(2.0)
    assert some.failed == {"broken": 40}
    assert [(line["event"], line["forecaster"], line["error"]) for line in logged] == [
        ("forecaster.failed", "broken", "RuntimeError('no')")
    ], "it is told once"
    assert "broken" not in some.scores()
    found = some.forecast()
    assert found is not None
    assert found.by == "last"


def test_two_negative_forecasts_are_no_good_score() -> None:
    some = book(models=[LastValue(), Wild()])
    for value in range(40):
        some.update(float(value % 3))
    assert some.best() == "last"
    assert all(score >= 0 for score in some.scores().values())


def test_what_was_forecast_for_another_horizon_is_no_score() -> None:
    some = book()
    for _ in range(30):
        some.update(5.0)
    before = some.scores()
    some.look_ahead(10)
    for _ in range(9):
        some.update(500.0)
    assert some.scores() == before
    some.look_ahead(-4)
    assert some.horizon == 1


def test_the_interval_holds_as_often_as_it_says() -> None:
    rng = random.Random(3)
    some = ForecastBook(season=1000, horizon=4, step_s=10.0, confidence=0.9)
    held = asked = 0
    due: list[float] = []
    for i in range(600):
        value = max(0.0, rng.gauss(20, 4))
        some.update(value)
        if len(due) >= 4:
            high = due.pop(0)
            if i > 100:
                asked += 1
                held += value <= high
        found = some.forecast()
        assert found is not None
        due.append(found.high)
    assert 0.84 <= held / asked <= 0.96


@settings(max_examples=50)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=80), st.integers(-2, 30))
def test_bounds_enclose_the_value(series: list[float | None], horizon: int) -> None:
    some = ForecastBook(season=12, horizon=horizon, step_s=5.0, models=forecasters(12))
    for value in series:
        some.update(value)
    found = some.forecast()
    assert found is None or 0 <= found.low <= found.value <= found.high


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e6), max_size=700), st.integers(1, 20))
def test_a_book_that_reads_the_past_is_the_one_that_saw_it(series: list[float], horizon: int) -> None:
    saw, reads = (ForecastBook(season=30, horizon=horizon, step_s=5.0, confidence=0.8) for _ in range(2))
    for value in series:
        saw.update(value)
    reads.recall(series)
    assert reads.scores() == saw.scores()
    assert reads.forecast() == saw.forecast()
