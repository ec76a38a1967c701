"""Scores every forecaster at the horizon that matters, uses the best one, and says how far it was off."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from headrace.planner.forecasters import Forecaster, ahead, counted, forecasters

KEPT_ERRORS = 240
LEAST_SCORED = 8  # forecasts that have come due before a model is believed
NORMAL_90 = 1.2816  # the 90 % quantile of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast: the value, and bounds that hold in `confidence` of the cases each. `by`: the model; "" = nothing is known."""

    value: float
    low: float
    high: float
    by: str


class ForecastBook:
    """All forecasters of one series, with their errors at one horizon."""

    def __init__(
        self,
        *,
        season: int,
        horizon: int,
        step_s: float,
        confidence: float = 0.9,
        models: Sequence[Forecaster] | None = None,
    ) -> None:
        """`horizon` and `season` are steps; `step_s` is the length of one."""
        self._models = list(models or forecasters(season))
        self._step_s = step_s
        self._confidence = confidence
        self._horizon = ahead(horizon)
        self._errors: dict[str, deque[float]] = {one.name: deque(maxlen=KEPT_ERRORS) for one in self._models}
        self._due: deque[dict[str, float]] = deque()
        self.failed: dict[str, int] = {}  # forecasters that raised, and how often: seen, not hidden

    @property
    def horizon(self) -> int:
        """Steps that are looked ahead."""
        return self._horizon

    def look_ahead(self, steps: int) -> None:
        """Change the horizon. What was forecast for another one is no score for this one, and is forgotten."""
        steps = ahead(steps)
        if steps != self._horizon:
            self._horizon = steps
            self._due.clear()

    def update(self, value: float | None) -> None:
        """Take the next value: score what was forecast of it, teach the models, and have them forecast again."""
        if len(self._due) >= self._horizon:
            told = self._due.popleft()
            if value is not None:
                for name, guess in told.items():
                    self._errors[name].append(value - guess)
        told = {}
        for model in self._models:
            try:
                model.update(value)
                guess_or_none = counted(model.predict(self._horizon))
            except Exception:  # a model of the user's own must not stop the planner, and is not used
                self.failed[model.name] = self.failed.get(model.name, 0) + 1
                continue
            if guess_or_none is not None:
                told[model.name] = guess_or_none
        self._due.append(told)

    def scores(self) -> dict[str, float]:
        """Return the mean absolute error of each model that was scored often enough. It cannot be negative."""
        return {
            name: sum(map(abs, errors)) / len(errors)
            for name, errors in self._errors.items()
            if len(errors) >= LEAST_SCORED and not self.failed.get(name)
        }

    def best(self) -> str:
        """Return the model with the least error. The last value stands until another one is better."""
        scores = self.scores()
        if not scores:
            return "last"
        least = min(scores.values())
        return "last" if scores.get("last", float("inf")) <= least else min(scores, key=lambda name: (scores[name], name))

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
        high = value + _quantile(errors, self._confidence)
        low = value + _quantile(errors, 1.0 - self._confidence)
        return Forecast(value=value, low=max(0.0, min(low, value)), high=max(high, value), by=name)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, between neighbours by a straight line."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
