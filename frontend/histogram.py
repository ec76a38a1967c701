"""A Prometheus histogram that is cheap enough for one observation per streamed event.

prometheus_client takes a lock and two method calls per observation, which is too much on the token path. This histogram belongs
to one event loop: an observation is a bisect and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
BYTES = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)


class Series:
    """The observations under one label value."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class FastHistogram(Collector):
    """A histogram with at most one label. Not thread-safe."""

    def __init__(
        self, registry: CollectorRegistry, name: str, help_text: str, *, label: str = "", bounds: Sequence[float] = SECONDS
    ):
        self._name = name
        self._help = help_text
        self._label = label
        self._bounds = tuple(bounds)
        self._series: dict[str, Series] = {}
        registry.register(self)

    def series(self, value: str = "") -> Series:
        """Return the series of this label value. Callers that observe often keep it."""
        found = self._series.get(value)
        if found is None:
            found = self._series[value] = Series(self._bounds)
        return found

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=[self._label] if self._label else [])
        for value, series in self._series.items():
            buckets: list[tuple[str, float]] = []
            running = 0
            for bound, count in zip((*self._bounds, float("inf")), series.counts, strict=True):
                running += count
                buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), running))
            family.add_metric([value] if self._label else [], buckets, series.total)
        yield family
