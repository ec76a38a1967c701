"""Forecasters of the package statsforecast, which the extra `forecasts` installs: `planner.forecasters` names them.

They are scored beside our own ones and are used where they are better. Their time is steps: a day of those is more than such a
model can be fitted to, so what comes again every day is left to `yesterday`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from headrace.base.errors import SettingsError
from headrace.config.planner_settings import forecaster_names
from headrace.planner.forecasters import Forecaster, ahead, counted

CLASSES = {"arima": "AutoARIMA", "ces": "AutoCES", "ets": "AutoETS", "theta": "AutoTheta"}
WINDOW = 240  # steps that a model is fitted to, at most
LEAST = 24  # and at least
REFIT = 24  # steps for which a fitted model is applied to what has come since


class _Model(Protocol):
    """The part of a model of statsforecast that is used."""

    def fit(self, y: Any) -> object: ...

    def forward(self, y: Any, h: int) -> dict[str, Any]: ...


class StatsForecastModel:
    """Model of statsforecast. A step that is not known is taken to be like the one before it: such models know no gaps."""

    def __init__(self, name: str, model: _Model) -> None:
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
        import numpy as np

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


def all_forecasters(own: Sequence[Forecaster], chosen: str) -> list[Forecaster]:
    """Return our own forecasters, and with them those that a setting names: never the latter alone."""
    return [*own, *statsforecast_models(chosen)]
