"""Accuracy of predictions: the uncached tokens and the time to first token of each placement against the worker's report."""

from __future__ import annotations

from typing import NamedTuple

from headrace.broker.messages import JobEvent
from headrace.router.placement.types import Placement
from headrace.router.session import metrics
from headrace.router.session.fleet_metrics import compare

LIMIT = 20_000  # placements remembered


class _Prediction(NamedTuple):
    uncached: int
    tokens: int
    arrived_s: float
    ttft_s: float
    fleet: str
    target_s: float | None  # None: it has none, so nothing is told of it by fleet


class PredictionAccuracy:
    """Keeps predictions of this router until the prefill is reported."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Prediction] = {}

    def __len__(self) -> int:
        return len(self._open)

    def placed(self, placement: Placement) -> None:
        """Remember the prediction of a placement."""
        request, chosen = placement.request, placement.fleet
        fleet, target_s = ("", request.ttft_target_s) if chosen is None else (chosen.fleet, chosen.ttft_target_s)
        self._open[request.id, request.attempt] = _Prediction(
            placement.uncached, request.tokens, request.arrived_s, placement.predicted_ttft_s, fleet, target_s
        )
        if len(self._open) > LIMIT:
            del self._open[next(iter(self._open))]
        metrics.OVERLAP_FOUND.inc(max(0, request.tokens - placement.uncached))

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Compare the end of a prefill with its prediction; forget predictions of requests that have ended."""
        if event.kind not in ("prefilled", "settled", "moved"):
            return
        predicted = self._open.pop((event.id, event.attempt), None)
        if predicted is None or event.kind != "prefilled":
            return
        missed = event.uncached - predicted.uncached
        (metrics.OVERLAP_LOST if missed > 0 else metrics.OVERLAP_GAINED).inc(abs(missed))
        actual_s = max(0.0, now_s - predicted.arrived_s)
        metrics.TTFT_PREDICTED_S.observe(predicted.ttft_s)
        metrics.TTFT_ACTUAL_S.observe(actual_s)
        metrics.TTFT_ERROR_S.observe(abs(actual_s - predicted.ttft_s))
        if predicted.target_s is not None:
            compare(predicted.fleet, target_s=predicted.target_s, predicted_s=predicted.ttft_s, observed_s=actual_s)
