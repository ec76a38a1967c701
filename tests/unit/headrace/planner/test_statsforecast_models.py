"""Forecasters of statsforecast, beside our own ones: asked for by name, fitted seldom; the package itself where it is there."""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec
from math import isfinite
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import SettingsError
from headrace.config.planner_settings import FORECASTERS, PlannerSettings
from headrace.planner.forecast_book import LEAST_SCORED
from headrace.planner.pool_planner import PoolPlanner
from headrace.planner.statsforecast_models import CLASSES, LEAST, REFIT, WINDOW, StatsForecastModel, statsforecast_models
from tests.support.planner_sights import SOME, seen, worker

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
