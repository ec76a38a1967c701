"""Prometheus metrics of the choice among fleets: what was chosen and why, and what became of the predictions."""

from __future__ import annotations

from headrace.base.metrics import Counter, Histogram
from headrace.broker.messages import FleetDecision

CLOSE = 0.2  # part of the measured time
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

DECISIONS = Counter("headrace_global_decisions_total", "Placements in pools with several fleets", ["pool", "fleet", "reason"])
TTFT_PREDICTED_S = Histogram(
    "headrace_global_ttft_predicted_seconds",
    "Predicted time from arrival to the first token, by fleet",
    ["fleet"],
    buckets=_SECONDS,
)
TTFT_OBSERVED_S = Histogram(
    "headrace_global_ttft_observed_seconds",
    "Measured time from arrival to the end of the prefill, of the same requests",
    ["fleet"],
    buckets=_SECONDS,
)
TTFT_ERROR_S = Histogram(
    "headrace_global_ttft_error_seconds", "How far the prediction was off, either way", ["fleet"], buckets=_SECONDS
)
PREDICTIONS = Counter(
    "headrace_global_ttft_predictions_total",
    "Requests by whether the predicted time to first token was within a fifth of the measured one",
    ["fleet", "met"],
)
TARGETS = Counter(
    "headrace_global_ttft_targets_total", "Requests by whether the target of the first token was met", ["fleet", "met"]
)


def count_decision(pool: str, decision: FleetDecision) -> None:
    """Count the fleet of a placement."""
    DECISIONS.labels(pool, decision.fleet, decision.reason).inc()


def compare(fleet: str, *, target_s: float, predicted_s: float, observed_s: float) -> None:
    """Compare the time to first token of a request with its prediction and its target."""
    TTFT_PREDICTED_S.labels(fleet).observe(predicted_s)
    TTFT_OBSERVED_S.labels(fleet).observe(observed_s)
    off_s = abs(observed_s - predicted_s)
    TTFT_ERROR_S.labels(fleet).observe(off_s)
    PREDICTIONS.labels(fleet, "yes" if off_s <= CLOSE * observed_s else "no").inc()
    TARGETS.labels(fleet, "yes" if observed_s <= target_s else "no").inc()
