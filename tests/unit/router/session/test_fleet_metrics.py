"""Counts of the choice among fleets with their values: predicted against observed, decisions and targets."""

from __future__ import annotations

from itertools import count

import pytest
from prometheus_client import REGISTRY

from headrace.broker.messages import FleetDecision, JobEvent
from headrace.router.placement.types import Placement, Waiting
from headrace.router.session.fleet_metrics import count_decision
from headrace.router.session.prediction_accuracy import PredictionAccuracy

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
