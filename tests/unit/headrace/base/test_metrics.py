"""Counting cheaply shows what prometheus_client would show."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from headrace.base import metrics

AMOUNTS = st.floats(min_value=0, max_value=1e6)
STEPS = st.lists(st.tuples(st.sampled_from(("inc", "dec", "set", "observe")), st.sampled_from(("a", "b", "")), AMOUNTS))


def exposed(module: Any, steps: list[tuple[str, str, float]]) -> list[str]:
    """Play the steps on metrics of this module. Returns the lines that a scrape would get, without the times of creation."""
    registry = CollectorRegistry()
    more: dict[str, Any] = {"registry": registry}
    counters = module.Counter("c", "text", **more), module.Counter("cl_total", "text", ["l"], **more)
    gauges = module.Gauge("g", "text", **more), module.Gauge("gl", "text", ["l"], **more)
    sizes = {"buckets": (0.5, 1, 1000.0), **more}
    histograms = module.Histogram("h", "text", **sizes), module.Histogram("hl", "text", ["l"], **sizes)
    for action, label, amount in steps:
        for plain, labelled in {"inc": (counters, gauges), "observe": (histograms,)}.get(action, (gauges,)):
            getattr(labelled.labels(label) if label else plain, action)(amount)
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(STEPS)
def test_what_is_shown_is_what_prometheus_client_would_show(steps: list[tuple[str, str, float]]) -> None:
    assert exposed(metrics, steps) == exposed(prometheus_client, steps)


@pytest.mark.parametrize("bound", [0.5, 1, 1000.0])
def test_an_observation_at_a_bound_counts_below_it(bound: float) -> None:
    assert exposed(metrics, [("observe", "", bound)]) == exposed(prometheus_client, [("observe", "", bound)])


def test_a_series_is_the_same_for_a_label_given_by_name_or_as_a_number() -> None:
    counter = metrics.Counter("c", "text", ["rank"], registry=None)
    series = counter.labels("1")
    assert counter.labels(rank="1") is series
    assert counter.labels(1) is series


def test_counting_down_is_refused() -> None:
    with pytest.raises(ValueError, match="no negative"):
        metrics.Counter("c", "text", registry=None).inc(-1)


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="Incorrect label count"):
        metrics.Gauge("g", "text", ["a", "b"], registry=None).labels("only one")
    with pytest.raises(ValueError, match="No label names"):
        metrics.Gauge("g", "text", registry=None).labels("one")


def test_a_metric_with_labels_cannot_count_without_them() -> None:
    with pytest.raises(AttributeError):
        metrics.Counter("c", "text", ["l"], registry=None).inc()


def test_a_gauge_may_take_its_value_from_a_function() -> None:
    registry = CollectorRegistry()
    metrics.Gauge("g", "text", registry=registry).set_function(lambda: 7)
    assert registry.get_sample_value("g") == 7
