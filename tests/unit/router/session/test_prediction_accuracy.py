"""Predictions against what came of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from headrace.broker.messages import JobEvent
from headrace.router.placement.types import Placement, Waiting
from headrace.router.session import metrics, prediction_accuracy
from headrace.router.session.prediction_accuracy import PredictionAccuracy


def value(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def placement(request_id: str = "a", *, uncached: int = 100, attempt: int = 1) -> Placement:
    request = Waiting(id=request_id, tokens=500, arrived_s=10.0, attempt=attempt)
    return Placement(
        request=request, worker="w", uncached=uncached, new_blocks=(), predicted_ttft_s=0.5, waited_s=0.1, reason="prefix"
    )


@pytest.mark.parametrize(("actual", "lost", "gained"), [(300, 200, 0), (100, 0, 0), (0, 0, 100)])
def test_cached_tokens_that_were_not_there_are_counted_as_lost(actual: int, lost: int, gained: int) -> None:
    names = ("overlap_found_tokens", "overlap_lost_tokens", "overlap_gained_tokens")
    before = [value(f"headrace_router_{name}_total") for name in names]
    seen = PredictionAccuracy()
    seen.placed(placement())
    seen.on_event(JobEvent("prefilled", "a", 1, "w", 500, actual), 11.0)
    after = [value(f"headrace_router_{name}_total") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [400, lost, gained]
    assert len(seen) == 0


def test_the_actual_time_to_the_first_token_is_measured_from_the_same_arrival() -> None:
    before = value("headrace_router_ttft_actual_seconds_sum"), value("headrace_router_ttft_error_seconds_sum")
    seen = PredictionAccuracy()
    seen.placed(placement())
    seen.on_event(JobEvent("prefilled", "a", 1, "w", 500, 100), 10.75)
    assert value("headrace_router_ttft_actual_seconds_sum") - before[0] == pytest.approx(0.75)
    assert value("headrace_router_ttft_error_seconds_sum") - before[1] == pytest.approx(0.25)


def test_a_prediction_is_counted_for_who_asks_for_a_time_in_a_pool_with_one_fleet_and_for_no_other() -> None:
    def counted() -> list[float]:
        labels = [("predictions", "yes"), ("predictions", "no"), ("targets", "yes"), ("targets", "no")]
        return [
            REGISTRY.get_sample_value(f"headrace_global_ttft_{name}_total", {"fleet": "", "met": met}) or 0.0
            for name, met in labels
        ]

    before, seen = counted(), PredictionAccuracy()
    seen.placed(placement("none"))
    seen.on_event(JobEvent("prefilled", "none", 1, "w", 500, 100), 10.5)
    assert counted() == before
    usual = placement("asks")
    seen.placed(replace(usual, request=replace(usual.request, ttft_target_s=0.4)))
    seen.on_event(JobEvent("prefilled", "asks", 1, "w", 500, 100), 10.55)
    assert [after - was for after, was in zip(counted(), before, strict=True)] == [1, 0, 0, 1]


def test_what_never_prefills_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_accuracy, "LIMIT", 3)
    seen = PredictionAccuracy()
    for n in range(10):
        seen.placed(placement(f"r{n}"))
    assert len(seen) == 3
    seen.on_event(JobEvent("moved", "r9", 1, "w"), 11.0)
    seen.on_event(JobEvent("prefilled", "r8", 2, "w"), 11.0)  # another attempt
    assert len(seen) == 2


def test_tenants_from_outside_cannot_fill_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_tenants", set())
    labels = {metrics.tenant_label(f"tenant-{n}") for n in range(1000)}
    assert len(labels) == metrics.MAX_TENANTS + 1
    assert metrics.tenant_label("tenant-0") == "tenant-0"
