from __future__ import annotations

import random
import sys
from importlib.util import find_spec
from math import isfinite, pi, sin
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.base.errors import SettingsError
from headrace.config.options import FORECASTERS, PlannerSettings
from headrace.planner.forecast import (
    CLASSES,
    LEAST,
    LEAST_SCORED,
    REFIT,
    WINDOW,
    ForecastBook,
    Holt,
    LocalTrend,
    Mean,
    SameTimeYesterday,
    StatsForecastModel,
    ahead,
    counted,
    forecasters,
    statsforecast_models,
)
from headrace.planner.pool_planner import PoolPlanner
from tests.support.planner_sights import SOME, seen, worker

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
    for model in (Mean(1, "last"), Mean(12, "mean")):
        model.update(4.0)
        model.update(None)
        assert model.predict(1) == 4.0


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
    return ForecastBook(**{"models": forecasters(24), "horizon": 3, "step_s": 10.0, **kw})  # type: ignore[arg-type]


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
    some = book(models=[Mean(1, "last"), Broken()])
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
    some = book(models=[Mean(1, "last"), Wild()])
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
    some = ForecastBook(forecasters(1000), horizon=4, step_s=10.0, confidence=0.9)
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
    some = ForecastBook(forecasters(12), horizon=horizon, step_s=5.0)
    for value in series:
        some.update(value)
    found = some.forecast()
    assert found is None or 0 <= found.low <= found.value <= found.high


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e6), max_size=700), st.integers(1, 20))
def test_a_book_that_reads_the_past_is_the_one_that_saw_it(series: list[float], horizon: int) -> None:
    saw, reads = (ForecastBook(forecasters(30), horizon=horizon, step_s=5.0, confidence=0.8) for _ in range(2))
    for value in series:
        saw.update(value)
    reads.recall(series)
    assert reads.scores() == saw.scores()
    assert reads.forecast() == saw.forecast()


real = pytest.mark.skipif(find_spec("statsforecast") is None, reason="`make forecasts` installs statsforecast")


class Drift:
    """Stands in for a model of theirs: the last value, and once more what it rose by since the one before."""

    def __init__(self, season_length: int = 1) -> None:
        assert season_length == 1
        self.fits: list[int] = []
        self.asked: list[int] = []

    def fit(self, y: Any) -> Drift:
        self.fits.append(len(y))
        return self

    def forward(self, y: Any, h: int) -> dict[str, Any]:
        assert self.fits, "it was not fitted"
        self.asked.append(h)
        return {"mean": np.array([y[-1] + (y[-1] - y[-2]) * (step + 1) for step in range(h)])}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there, with models of which one is as good as another."""
    package, models = ModuleType("statsforecast"), ModuleType("statsforecast.models")
    for name in CLASSES.values():
        setattr(models, name, Drift)
    package.models = models  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "statsforecast", package)
    monkeypatch.setitem(sys.modules, "statsforecast.models", models)


def fed(values: list[float | None]) -> tuple[StatsForecastModel, Drift]:
    model = Drift()
    some = StatsForecastModel("ets", model)
    for value in values:
        some.update(value)
        some.predict(3)
    return some, model


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsforecast", None)
    with pytest.raises(SettingsError, match=r"planner.forecasters needs .* pip install 'headrace\[forecasts\]'"):
        statsforecast_models("ets")
    with pytest.raises(SettingsError, match="headrace"):
        PoolPlanner(PlannerSettings(forecasters="ets"))


def test_it_is_not_imported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsforecast", None)
    assert statsforecast_models("") == []
    assert PoolPlanner(PlannerSettings()).book.best() == "last"


def test_a_model_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="prophet is none of arima, ces, ets, theta"):
        PlannerSettings(forecasters="ets, prophet")
    assert set(CLASSES) == set(FORECASTERS)


@pytest.mark.usefixtures("installed")
def test_they_are_scored_beside_the_last_value_and_the_same_time_yesterday() -> None:
    some = PoolPlanner(PlannerSettings(forecasters="theta,ets", season_s=300.0, step_s=5.0, start_s=10.0))
    for i in range(140):
        some.tick(seen(5.0 * i, worker("a"), arrived=40 + i, placed=SOME, outputs=(10,)))
    assert {"last", "yesterday", "ets", "theta"} <= set(some.book.scores())
    assert some.book.scores()["ets"] < some.book.scores()["last"], "the load rises, and that model says so"


def test_a_model_is_fitted_anew_every_so_many_steps_and_applied_to_what_came_since() -> None:
    _, model = fed([float(i % 7) for i in range(LEAST + 2 * REFIT)])
    assert len(model.fits) == 3
    assert model.fits == [LEAST, LEAST + REFIT, LEAST + 2 * REFIT]
    assert len(model.asked) == 2 * REFIT + 1
    _, long = fed([float(i % 7) for i in range(3 * WINDOW)])
    assert max(long.fits) == WINDOW


def test_a_load_that_falls_is_never_forecast_below_zero() -> None:
    some, _ = fed([float(LEAST - i) for i in range(LEAST)])
    assert some.predict(5) == 0.0


def test_too_few_steps_are_no_forecast_and_a_flat_series_is_not_fitted() -> None:
    some, model = fed([None, None, *([2.0] * (LEAST - 1))])
    assert some.predict(1) is None
    some.update(2.0)
    assert some.predict(1) == 2.0
    assert model.fits == []


def test_a_step_that_is_not_known_is_like_the_one_before_it() -> None:
    some, _ = fed([*[float(i) for i in range(LEAST)], None])
    assert some.predict(4) == LEAST - 1


@pytest.mark.usefixtures("installed")
def test_a_restart_forecasts_nothing_whose_error_would_be_forgotten() -> None:
    chosen = PlannerSettings(forecasters="ets", step_s=5.0, start_s=10.0)
    some = PoolPlanner(chosen)
    for i in range(5000):
        some.series.add(i % 50, since_s=5.0 * i, until_s=5.0 * (i + 1))
    book = some.new_book()
    (model,) = (one for one in book._models if one.name == "ets")
    assert isinstance(model, StatsForecastModel)
    assert isinstance(model._model, Drift)
    assert len(model._model.asked) <= 240 + book.horizon + 1
    assert book.scores().keys() >= {"ets", "last"}


@real
@pytest.mark.parametrize("name", FORECASTERS)
def test_the_models_themselves_forecast_a_rising_load_better_than_the_last_value(name: str) -> None:
    (model,) = statsforecast_models(name)
    rng = random.Random(1)
    for i in range(120):
        model.update(5.0 + 0.2 * i + rng.gauss(0.0, 0.3))
    guess = model.predict(12)
    assert guess is not None
    assert isfinite(guess)
    will_be = 5.0 + 0.2 * 131
    last = 5.0 + 0.2 * 119
    assert abs(guess - will_be) < will_be - last


@real
@pytest.mark.parametrize("name", FORECASTERS)
def test_no_series_of_counts_makes_the_models_raise(name: str) -> None:
    for series in ([0.0] * 60, [0.0] * 59 + [400.0], [float(i % 2) for i in range(60)], [1e9 * (i % 3) for i in range(60)]):
        some = PoolPlanner(PlannerSettings(forecasters=name, step_s=5.0, start_s=10.0))
        for value in series:
            some.book.update(value)
        assert some.book.failed == {}
        found = some.book.forecast()
        assert found is not None
        assert isfinite(found.high)
    assert len(some.book._errors[name]) >= LEAST_SCORED
