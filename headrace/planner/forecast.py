"""Forecast a series of equal steps: simple models in plain Python, each fed one value after the other.

- `last`: the last known value. Every other model has to be better than this one.
- `mean`, `short`: the mean of the last 12 and of the last 4 steps.
- `yesterday`: the value of the same time one season earlier.
- `holt`, `holt_slow`, `holt_long`, `holt_fast`: level and damped trend (Gardner and McKenzie 1985), damped more or less.
- `trend`, `trend_slow`, `trend_calm`, `trend_fast`: Kalman filters for a local linear trend, which differ in how soon they take
  noise for one.

An unknown value (None) moves time on and teaches nothing. A forecast is always of the future, finite, and never negative: the
models are of things that are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Protocol

import numpy as np
import structlog

from headrace.base.errors import SettingsError
from headrace.config.options import forecaster_names


class Forecaster(Protocol):
    name: str

    def update(self, value: float | None) -> None:
        """Take the next value."""

    def predict(self, steps: int) -> float | None:
        """Return the value in `steps` steps from the last one, None while the model knows too little."""


def ahead(steps: int) -> int:
    """Return a horizon that lies in the future."""
    return max(1, steps)


def counted(value: float | None) -> float | None:
    """Return a forecast that can be one of a count: at least 0; None for what is no number."""
    return None if value is None or not isfinite(value) else max(0.0, value)


class Mean:
    """The mean of the last `window` known values: with a window of 1 the last value."""

    def __init__(self, window: int, name: str) -> None:
        self.name = name
        self._values: deque[float] = deque(maxlen=window)

    def update(self, value: float | None) -> None:
        if value is not None:
            self._values.append(value)

    def predict(self, steps: int) -> float | None:
        return sum(self._values) / len(self._values) if self._values else None


class SameTimeYesterday:
    """The value one season before the time that is asked about, averaged with its two neighbours."""

    name = "yesterday"

    def __init__(self, season: int) -> None:
        self._season = max(2, season)
        self._values: deque[float | None] = deque(maxlen=self._season + 1)

    def update(self, value: float | None) -> None:
        self._values.append(value)

    def predict(self, steps: int) -> float | None:
        first = len(self._values) - 1 + (ahead(steps) - 1) % self._season + 1 - self._season
        around = [self._values[i] for i in (first - 1, first, first + 1) if 0 <= i < len(self._values)]
        known = [value for value in around if value is not None]
        return counted(sum(known) / len(known)) if known and first >= 0 else None


class Holt:
    """Level and damped trend."""

    def __init__(self, *, level: float = 0.4, trend: float = 0.1, damping: float = 0.9, name: str = "holt") -> None:
        self.name = name
        self._alpha, self._beta, self._phi = level, trend, damping
        self._level: float | None = None
        self._trend = 0.0

    def update(self, value: float | None) -> None:
        if self._level is None:
            self._level = value
            return
        expected = self._level + self._phi * self._trend
        level = expected if value is None else expected + self._alpha * (value - expected)
        self._trend = self._phi * self._trend + (0.0 if value is None else self._beta * (level - expected) / self._alpha)
        self._level = max(0.0, level)

    def predict(self, steps: int) -> float | None:
        if self._level is None:
            return None
        phi = self._phi
        return counted(self._level + self._trend * phi * (1 - phi ** ahead(steps)) / (1 - phi))


NOISE_VAR = 10.0
LEAST_SEEN = 5  # values before a trend is forecast


class LocalTrend:
    """Kalman filter of a local linear trend; only the ratio of the variances matters for its mean."""

    def __init__(self, *, level_var: float = 0.5, trend_var: float = 0.02, name: str = "trend") -> None:
        self.name = name
        self._q = level_var, trend_var
        self._seen = 0
        self._level, self._slope = 0.0, 0.0
        self._p = (1e4, 0.0, 1e2)  # covariance: 00 01 11

    def update(self, value: float | None) -> None:
        if not self._seen and value is None:
            return
        a, b, c = self._p
        a, b, c = a + 2 * b + c + self._q[0], b + c, c + self._q[1]
        self._level += self._slope
        if value is not None:
            self._seen += 1
            gain_level, gain_slope = a / (a + NOISE_VAR), b / (a + NOISE_VAR)
            error = value - self._level
            self._level += gain_level * error
            self._slope += gain_slope * error
            a, b, c = (1 - gain_level) * a, (1 - gain_level) * b, c - gain_slope * b
        self._p = min(a, 1e6), b, min(c, 1e6)

    def predict(self, steps: int) -> float | None:
        return counted(self._level + self._slope * ahead(steps)) if self._seen >= LEAST_SEEN else None


def forecasters(season: int) -> list[Forecaster]:
    """Return a fresh model of each kind. `season`: steps of a day."""
    return [
        Mean(1, "last"),
        Mean(12, "mean"),
        Mean(4, "short"),
        SameTimeYesterday(season),
        Holt(),
        Holt(level=0.2, trend=0.2, damping=0.99, name="holt_slow"),
        Holt(level=0.3, trend=0.2, damping=0.98, name="holt_long"),
        Holt(level=0.5, trend=0.3, damping=0.95, name="holt_fast"),
        LocalTrend(trend_var=0.0005, name="trend_slow"),
        LocalTrend(trend_var=0.005, name="trend_calm"),
        LocalTrend(),
        LocalTrend(trend_var=0.1, name="trend_fast"),
    ]


# Scores every forecaster at the horizon that matters, uses the one that needs the least headroom, and says how much it needs.
#
# Workers are planned for a quantile of what will come and not for its mean, so a forecaster is as good as its quantile:
# errors count as the quantile's loss (Koenker and Bassett 1978), with the quantile that its own errors have. They are kept as
# differences of square roots, on which counts of independent arrivals scatter alike whether there are few or many.

log = structlog.get_logger()

KEPT_ERRORS = 240
LEAST_SCORED = 8  # forecasts that have come due before a model is believed
NORMAL_90 = 1.2816  # the 90 % quantile of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast: the value, and bounds that hold in `confidence` of the cases each. `by`: the model."""

    value: float
    low: float
    high: float
    by: str


class ForecastBook:
    """All forecasters of one series, with their errors at one horizon."""

    def __init__(self, models: Sequence[Forecaster], *, horizon: int, step_s: float, confidence: float = 0.9) -> None:
        """`horizon`: steps; `step_s`: the length of one."""
        self._models = models
        self._step_s = step_s
        self.confidence = confidence
        self.horizon = ahead(horizon)
        self._errors: dict[str, deque[float]] = {one.name: deque(maxlen=KEPT_ERRORS) for one in models}
        self._due: deque[dict[str, float]] = deque()
        self.failed: dict[str, int] = {}  # forecasters that raised, and how often: seen, not hidden

    def look_ahead(self, steps: int) -> None:
        """Change the horizon. Forecasts for another one are no score for this one, and are forgotten."""
        steps = ahead(steps)
        if steps != self.horizon:
            self.horizon = steps
            self._due.clear()

    def recall(self, values: Sequence[float | None]) -> None:
        """Take values of the past over. Forecasts whose errors would be forgotten by now are not made: it would take long."""
        known, begin = 0, len(values)
        while begin and known < KEPT_ERRORS:
            begin -= 1
            known += values[begin] is not None
        for place, value in enumerate(values):
            self.update(value, forecasting=place >= begin - self.horizon)

    def update(self, value: float | None, *, forecasting: bool = True) -> None:
        """Take the next value: score the forecasts of it, teach the models, and have them forecast again."""
        if len(self._due) >= self.horizon:
            for name, guess in self._due.popleft().items():
                if value is not None:
                    self._errors[name].append(sqrt(value) - sqrt(guess))
        told = {}
        for model in self._models:
            try:
                model.update(value)
                guess_or_none = counted(model.predict(self.horizon)) if forecasting else None
            except Exception as error:  # a model of others must not stop the planner, and is not used
                if model.name not in self.failed:
                    log.warning("forecaster.failed", forecaster=model.name, error=repr(error))
                self.failed[model.name] = self.failed.get(model.name, 0) + 1
                continue
            if guess_or_none is not None:
                told[model.name] = guess_or_none
        if forecasting:
            self._due.append(told)

    def scores(self) -> dict[str, float]:
        """Return the mean loss of each model that was scored often enough. It cannot be negative."""
        return {
            name: _loss(errors, self.confidence)
            for name, errors in self._errors.items()
            if len(errors) >= LEAST_SCORED and not self.failed.get(name)
        }

    def best(self) -> str:
        """Return the model with the least loss. The last value stands until another one is better."""
        return min(self.scores().items(), key=lambda one: (one[1], one[0] != "last", one[0]), default=("last", 0.0))[0]

    def forecast(self) -> Forecast | None:
        """Return the forecast at the horizon, None while no value is known."""
        told = self._due[-1] if self._due else {}
        name = self.best()
        if name not in told:
            name = "last"
        value = told.get(name)
        if value is None:
            return None
        errors = sorted(self._errors[name])
        if len(errors) < LEAST_SCORED:  # counts of independent arrivals: their variance is their mean
            spread = NORMAL_90 * sqrt(max(value, 1.0 / self._step_s) / self._step_s)
            return Forecast(value=value, low=max(0.0, value - spread), high=value + spread, by=name)
        high = _moved(value, _quantile(errors, self.confidence))
        low = _moved(value, _quantile(errors, 1.0 - self.confidence))
        return Forecast(value=value, low=min(low, value), high=max(high, value), by=name)


def _moved(value: float, error: float) -> float:
    """Return a value that is off by an error of its square root."""
    return max(0.0, sqrt(value) + error) ** 2


def _loss(errors: Sequence[float], confidence: float) -> float:
    """Return the mean loss of a bound that keeps the quantile of these errors as headroom, at least none."""
    bound = max(0.0, _quantile(sorted(errors), confidence))
    return sum(confidence * (one - bound) if one > bound else (1.0 - confidence) * (bound - one) for one in errors) / len(
        errors
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


# Forecasters of the package statsforecast, which the extra `forecasts` installs: `planner.forecasters` names them.
#
# They are scored beside our own ones and are used where they are better. Their time is steps: a day of those is more than
# such a model can be fitted to, so what comes again every day is left to `yesterday`.

CLASSES = {"arima": "AutoARIMA", "ces": "AutoCES", "ets": "AutoETS", "theta": "AutoTheta"}
WINDOW = 240  # steps that a model is fitted to, at most
LEAST = 24  # and at least
REFIT = 24  # steps for which a fitted model is applied to what has come since


class StatsForecastModel:
    """Model of statsforecast. A step that is not known is taken to be like the one before it: such models know no gaps."""

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self._model = model
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._fitted: int | None = None  # steps ago

    def update(self, value: float | None) -> None:
        if value is None and not self._values:
            return
        self._values.append(self._values[-1] if value is None else value)
        if self._fitted is not None:
            self._fitted += 1

    def predict(self, steps: int) -> float | None:
        if len(self._values) < LEAST:
            return None
        if min(self._values) == max(self._values):  # nothing to fit, and some models divide by what it varies
            return counted(self._values[-1])
        values = np.array(self._values, dtype=np.float64)
        if self._fitted is None or self._fitted >= REFIT:
            self._model.fit(values)
            self._fitted = 0
        return counted(float(self._model.forward(values, h=ahead(steps))["mean"][-1]))


def statsforecast_models(chosen: str) -> list[Forecaster]:
    """Return a fresh model of each that a setting names. Raises SettingsError where the package is not installed."""
    names = forecaster_names(chosen)
    if not names:
        return []
    try:
        from statsforecast import models  # pandas and statsmodels with it: two seconds, for those who use it
    except ImportError:
        raise SettingsError("planner.forecasters needs the package statsforecast: pip install 'headrace[forecasts]'") from None
    return [StatsForecastModel(name, getattr(models, CLASSES[name])(season_length=1)) for name in names]
