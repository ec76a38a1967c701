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
from math import isfinite
from typing import Protocol


class Forecaster(Protocol):
    """A model of a series."""

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


class LastValue:
    """The last known value."""

    name = "last"

    def __init__(self) -> None:
        self._last: float | None = None

    def update(self, value: float | None) -> None:
        self._last = self._last if value is None else value

    def predict(self, steps: int) -> float | None:
        return self._last


class Mean:
    """The mean of the last `window` known values."""

    def __init__(self, window: int = 12, name: str = "mean") -> None:
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


class LocalTrend:
    """Kalman filter of a local linear trend; only the ratio of the variances matters for its mean."""

    def __init__(
        self,
        *,
        level_var: float = 0.5,
        trend_var: float = 0.02,
        noise_var: float = 10.0,
        least: int = 5,
        name: str = "trend",
    ) -> None:
        self.name = name
        self._q = level_var, trend_var
        self._r = noise_var
        self._least = least
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
            gain_level, gain_slope = a / (a + self._r), b / (a + self._r)
            error = value - self._level
            self._level += gain_level * error
            self._slope += gain_slope * error
            a, b, c = (1 - gain_level) * a, (1 - gain_level) * b, c - gain_slope * b
        self._p = min(a, 1e6), b, min(c, 1e6)

    def predict(self, steps: int) -> float | None:
        return counted(self._level + self._slope * ahead(steps)) if self._seen >= self._least else None


def forecasters(season: int) -> list[Forecaster]:
    """Return a fresh model of each kind. `season`: steps of a day."""
    return [
        LastValue(),
        Mean(),
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
