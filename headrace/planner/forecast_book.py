"""Scores every forecaster at the horizon that matters, uses the one that needs the least headroom, and says how much it needs.

Workers are planned for a quantile of what will come and not for its mean, so a forecaster is as good as its quantile: errors
count as the quantile's loss (Koenker and Bassett 1978), with the quantile that its own errors have. They are kept as
differences of square roots, on which counts of independent arrivals scatter alike whether there are few or many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import structlog

from headrace.planner.forecasters import Forecaster, ahead, counted, forecasters

log = structlog.get_logger()

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
        self._best: str | None = None  # None until the errors are looked at again
        self.failed: dict[str, int] = {}  # forecasters that raised, and how often: seen, not hidden

    @property
    def horizon(self) -> int:
        """Steps that are looked ahead."""
        return self._horizon

    def expect(self, confidence: float) -> None:
        """Change the quantile that is asked for."""
        if confidence != self._confidence:
            self._confidence = confidence
            self._best = None

    def look_ahead(self, steps: int) -> None:
        """Change the horizon. What was forecast for another one is no score for this one, and is forgotten."""
        steps = ahead(steps)
        if steps != self._horizon:
            self._horizon = steps
            self._due.clear()

    def recall(self, values: Sequence[float | None]) -> None:
        """Take values of the past over. Forecasts whose errors would be forgotten by now are not made: it would take long."""
        known, begin = 0, len(values)
        while begin and known < KEPT_ERRORS:
            begin -= 1
            known += values[begin] is not None
        begin = max(0, begin - self._horizon)
        for value in values[:begin]:
            for model in self._models:
                self._teach(model, value)
        for value in values[begin:]:
            self.update(value)

    def _teach(self, model: Forecaster, value: float | None) -> bool:
        try:
            model.update(value)
        except Exception as error:
            self._fail(model, error)
            return False
        return True

    def _fail(self, model: Forecaster, error: Exception) -> None:
        if model.name not in self.failed:
            log.warning("forecaster.failed", forecaster=model.name, error=repr(error))
        self.failed[model.name] = self.failed.get(model.name, 0) + 1
        self._best = None

    def update(self, value: float | None) -> None:
        """Take the next value: score what was forecast of it, teach the models, and have them forecast again."""
        if len(self._due) >= self._horizon:
            told = self._due.popleft()
            if value is not None:
                for name, guess in told.items():
                    self._errors[name].append(sqrt(value) - sqrt(guess))
            self._best = None
        told = {}
        for model in self._models:
            if not self._teach(model, value):  # a model of others must not stop the planner, and is not used
                continue
            try:
                guess_or_none = counted(model.predict(self._horizon))
            except Exception as error:
                self._fail(model, error)
                continue
            if guess_or_none is not None:
                told[model.name] = guess_or_none
        self._due.append(told)

    def scores(self) -> dict[str, float]:
        """Return the mean loss of each model that was scored often enough. It cannot be negative."""
        return {
            name: _loss(errors, self._confidence)
            for name, errors in self._errors.items()
            if len(errors) >= LEAST_SCORED and not self.failed.get(name)
        }

    def best(self) -> str:
        """Return the model with the least loss. The last value stands until another one is better."""
        if self._best is None:
            scores = self.scores()
            least = min(scores.values(), default=0.0)
            last = not scores or scores.get("last", float("inf")) <= least
            self._best = "last" if last else min(scores, key=lambda name: (scores[name], name))
        return self._best

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
        high = _moved(value, _quantile(errors, self._confidence))
        low = _moved(value, _quantile(errors, 1.0 - self._confidence))
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
    """Return the quantile of sorted values, between neighbours by a straight line."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
