"""How good the predictions were: what a placement foretold against what its worker then reported."""

from __future__ import annotations

from typing import NamedTuple

from headrace.broker.messages import JobEvent
from headrace.router.placement.types import Placement
from headrace.router.session import metrics

LIMIT = 20_000  # placements remembered


class _Foretold(NamedTuple):
    uncached: int
    tokens: int
    arrived_s: float
    ttft_s: float


class PredictionAccuracy:
    """Placements of this router until their prefill is reported."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Foretold] = {}

    def __len__(self) -> int:
        return len(self._open)

    def placed(self, placement: Placement) -> None:
        request = placement.request
        self._open[request.id, request.attempt] = _Foretold(
            placement.uncached, request.tokens, request.arrived_s, placement.predicted_ttft_s
        )
        if len(self._open) > LIMIT:
            del self._open[next(iter(self._open))]
        metrics.OVERLAP_FOUND.inc(max(0, request.tokens - placement.uncached))

    def on_event(self, event: JobEvent, now_s: float) -> None:
        if event.kind not in ("prefilled", "settled", "moved"):
            return
        foretold = self._open.pop((event.id, event.attempt), None)
        if foretold is None or event.kind != "prefilled":
            return
        missed = event.uncached - foretold.uncached
        (metrics.OVERLAP_LOST if missed > 0 else metrics.OVERLAP_GAINED).inc(abs(missed))
        actual_s = max(0.0, now_s - foretold.arrived_s)
        metrics.TTFT_PREDICTED_S.observe(foretold.ttft_s)
        metrics.TTFT_ACTUAL_S.observe(actual_s)
        metrics.TTFT_ERROR_S.observe(abs(actual_s - foretold.ttft_s))
