"""A Prometheus histogram that is cheap enough for one observation per streamed event.

prometheus_client takes a lock and two method calls per observation, which is too much on the token path. This histogram belongs
to one event loop: an observation is a bisect and two additions.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
BYTES = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)


class Series:
    """The observations under one value of each label. `exemplars`: by bucket, the last one."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def show(self, value: float, trace: int) -> None:
        """Name the trace of an observation, for scrapers that take OpenMetrics. The last one of each bucket is shown."""
        shown = Exemplar({"trace_id": f"{trace:032x}"}, value, time.time())
        self.exemplars[bisect_left(self._bounds, value)] = shown


class FastHistogram(Collector):
    """A histogram. Not thread-safe."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        help_text: str,
        *,
        labels: Sequence[str] = (),
        bounds: Sequence[float] = SECONDS,
    ):
        self._name = name
        self._help = help_text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def series(self, *values: str) -> Series:
        """Return the series of these label values. Callers that observe often keep it."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self._bounds)
        return found

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, series in self._series.items():
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            running = 0
            for number, count in enumerate(series.counts):
                running += count
                bound = str(float(self._bounds[number])) if number < len(self._bounds) else "+Inf"
                shown = series.exemplars.get(number)
                buckets.append((bound, running) if shown is None else (bound, running, shown))
            family.add_metric(values, buckets, series.total)
        yield family
