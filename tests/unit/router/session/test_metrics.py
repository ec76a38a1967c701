"""Counts of the choice among fleets with their values: predicted against observed, decisions and targets."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from headrace.broker.messages.control import FleetDecision
from headrace.broker.messages.events import JobEvent
from headrace.router.placement.types import Placement, Waiting
from headrace.router.session import metrics
from headrace.router.session import metrics as prediction_accuracy
from headrace.router.session.metrics import PredictionAccuracy, SuspectWaits, count_decision

ARRIVED_S = 10.0
_number = count()


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_global_{name}", labels) or 0.0


@pytest.fixture
def fleet() -> str:
    """A fleet of its own, whose counts begin at zero."""
    return f"fleet-{next(_number)}"


def served(fleet: str | None, *, predicted_s: float, observed_s: float, target_s: float = 1.0) -> None:
    """Have a router place a request in a fleet, and its worker report the end of the prefill."""
    decision = (
        None if fleet is None else FleetDecision(fleet=fleet, reason="cheapest", ttft_target_s=target_s, itl_target_s=1.0)
    )
    placement = Placement(
        request=Waiting(id="r", tokens=500, arrived_s=ARRIVED_S, attempt=1),
        worker="w",
        uncached=500,
        new_blocks=(),
        predicted_ttft_s=predicted_s,
        waited_s=0.0,
        reason="load",
        fleet=decision,
    )
    accuracy = PredictionAccuracy()
    accuracy.placed(placement)
    accuracy.on_event(JobEvent("prefilled", "r", 1, "w", 500, 500), ARRIVED_S + observed_s)


def test_the_predicted_and_the_observed_first_token_of_the_same_request_are_measured(fleet: str) -> None:
    served(fleet, predicted_s=0.5, observed_s=0.75)
    served(fleet, predicted_s=2.0, observed_s=1.75)
    assert value("ttft_predicted_seconds_count", fleet=fleet) == 2
    assert value("ttft_predicted_seconds_sum", fleet=fleet) == pytest.approx(2.5)
    assert value("ttft_observed_seconds_count", fleet=fleet) == 2
    assert value("ttft_observed_seconds_sum", fleet=fleet) == pytest.approx(2.5)
    assert value("ttft_error_seconds_sum", fleet=fleet) == pytest.approx(0.5), "too early and too late do not cancel out"


@pytest.mark.parametrize(
    ("predicted_s", "met"), [(0.79, "no"), (0.81, "yes"), (1.0, "yes"), (1.19, "yes"), (1.21, "no")], ids=str
)
def test_a_prediction_is_met_within_a_fifth_of_what_was_observed(fleet: str, predicted_s: float, met: str) -> None:
    served(fleet, predicted_s=predicted_s, observed_s=1.0)
    assert value("ttft_predictions_total", fleet=fleet, met=met) == 1
    assert value("ttft_predictions_total", fleet=fleet, met={"yes": "no", "no": "yes"}[met]) == 0


@pytest.mark.parametrize(("observed_s", "met"), [(0.5, "yes"), (1.0, "yes"), (1.5, "no")], ids=str)
def test_a_target_is_met_by_what_was_observed_and_not_by_what_was_predicted(fleet: str, observed_s: float, met: str) -> None:
    served(fleet, predicted_s=0.5, observed_s=observed_s, target_s=1.0)
    assert value("ttft_targets_total", fleet=fleet, met=met) == 1
    assert value("ttft_targets_total", fleet=fleet, met={"yes": "no", "no": "yes"}[met]) == 0


def test_one_fleet_counts_nothing_of_another(fleet: str) -> None:
    served(f"{fleet}-other", predicted_s=0.5, observed_s=0.75)
    served(None, predicted_s=0.5, observed_s=0.75)
    assert value("ttft_observed_seconds_count", fleet=fleet) == 0
    assert value("ttft_observed_seconds_count", fleet=f"{fleet}-other") == 1


def test_decisions_are_counted_by_pool_fleet_and_reason(fleet: str) -> None:
    for reason in ("cheapest", "meets", "cheapest"):
        count_decision("m.default", FleetDecision(fleet=fleet, reason=reason, ttft_target_s=1.0, itl_target_s=1.0))
    assert value("decisions_total", pool="m.default", fleet=fleet, reason="cheapest") == 2
    assert value("decisions_total", pool="m.default", fleet=fleet, reason="meets") == 1


def prediction_accuracy_value(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def placement(request_id: str = "a", *, uncached: int = 100, attempt: int = 1) -> Placement:
    request = Waiting(id=request_id, tokens=500, arrived_s=10.0, attempt=attempt)
    return Placement(
        request=request, worker="w", uncached=uncached, new_blocks=(), predicted_ttft_s=0.5, waited_s=0.1, reason="prefix"
    )


@pytest.mark.parametrize(("actual", "lost", "gained"), [(300, 200, 0), (100, 0, 0), (0, 0, 100)])
def test_cached_tokens_that_were_not_there_are_counted_as_lost(actual: int, lost: int, gained: int) -> None:
    names = ("overlap_found_tokens", "overlap_lost_tokens", "overlap_gained_tokens")
    before = [prediction_accuracy_value(f"headrace_router_{name}_total") for name in names]
    seen = PredictionAccuracy()
    seen.placed(placement())
    seen.on_event(JobEvent("prefilled", "a", 1, "w", 500, actual), 11.0)
    after = [prediction_accuracy_value(f"headrace_router_{name}_total") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [400, lost, gained]
    assert len(seen) == 0


def test_the_actual_time_to_the_first_token_is_measured_from_the_same_arrival() -> None:
    before = (
        prediction_accuracy_value("headrace_router_ttft_actual_seconds_sum"),
        prediction_accuracy_value("headrace_router_ttft_error_seconds_sum"),
    )
    seen = PredictionAccuracy()
    seen.placed(placement())
    seen.on_event(JobEvent("prefilled", "a", 1, "w", 500, 100), 10.75)
    assert prediction_accuracy_value("headrace_router_ttft_actual_seconds_sum") - before[0] == pytest.approx(0.75)
    assert prediction_accuracy_value("headrace_router_ttft_error_seconds_sum") - before[1] == pytest.approx(0.25)


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


def measured() -> tuple[float, float]:
    samples = {sample.name: sample.value for sample in metrics.SUSPECTS_HELD_S.collect()[0].samples}
    name = "headrace_router_suspects_held_seconds"
    return samples[f"{name}_count"], samples[f"{name}_sum"]


def test_a_wait_is_told_once_and_measured_once() -> None:
    waits, (count, seconds) = SuspectWaits("p"), measured()
    with capture_logs() as logs:
        for at_s, suspects in ((1.0, 0), (2.0, 3), (3.0, 2), (4.5, 0), (5.0, 0)):
            waits.note(suspects, at_s)
    assert [(entry["event"], entry.get("suspects"), entry.get("waited_s")) for entry in logs] == [
        ("suspects.held", 3, None),
        ("suspects.released", None, 2.5),
    ]
    assert measured() == (count + 1, seconds + 2.5)


def test_each_wait_is_measured_by_itself() -> None:
    waits, (count, seconds) = SuspectWaits("p"), measured()
    for at_s, suspects in ((1.0, 1), (2.0, 0), (10.0, 1), (10.5, 0)):
        waits.note(suspects, at_s)
    assert measured() == (count + 2, seconds + 1.5)
