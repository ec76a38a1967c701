"""Prometheus metrics of a router.

Tenants come from clients, so only the first `MAX_TENANTS` of a process get a label of their own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import structlog

from headrace.base.metrics import Counter, Gauge, Histogram
from headrace.broker.messages.control import FleetDecision
from headrace.broker.messages.events import JobEvent
from headrace.jetstream.subjects import REQUEST_CLASSES
from headrace.router.placement.types import Placement

MAX_TENANTS = 32
OTHER_TENANTS = "(other)"

DECISION_S = Histogram(
    "headrace_router_decision_seconds",
    "Time to decide what can be placed, per look at the window",
    buckets=(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1),
)
RECEIVED = Counter("headrace_router_requests_total", "Requests taken into the window", ["request_class"])
WINDOW = Gauge("headrace_router_window", "Requests that wait for their placement", ["pool", "request_class", "tenant"])
OLDEST_S = Gauge(
    "headrace_router_oldest_seconds", "Age of the oldest request in the window, since its frontend took it", ["pool"]
)
WINDOW_BYTES = Gauge("headrace_router_window_bytes", "Bytes of the requests held", ["pool"])
WAITED_S = Histogram(
    "headrace_router_waited_seconds",
    "Time in the window until the placement",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
WAKES = Counter("headrace_router_wakes_total", "Sleeping workers that this router woke for requests", ["pool", "outcome"])
PLACED = Counter("headrace_router_placed_total", "Placements by reason", ["reason"])
PREFILL = Counter(
    "headrace_router_prefill_total",
    "Placements in pools with a prefill side, by where the prompt is computed and why",
    ["where", "reason"],
)
PREFILL_WORKERS = Gauge("headrace_router_prefill_workers", "Workers known that only compute prompts for others", ["pool"])
PREFILL_QUEUE = Gauge(
    "headrace_router_prefill_queue_tokens",
    "Prompt tokens placed for prefill workers and, as predicted, not computed yet",
    ["pool"],
)
SHED = Counter("headrace_router_shed_total", "Requests ended instead of placed", ["code"])
DROPPED = Counter("headrace_router_dropped_total", "Requests that left the window in other ways", ["how"])
SESSION_FAILURES = Counter("headrace_router_session_failures_total", "Sessions that an unexpected error ended", ["pool"])
IN_FLIGHT = Gauge("headrace_router_placements_in_flight", "Placements not yet confirmed by the broker", ["pool"])
RETRIES = Counter("headrace_router_placement_retries_total", "Placements sent again", ["why"])

WORKERS = Gauge("headrace_router_workers", "Workers known", ["pool"])
PLACES = Gauge("headrace_router_places", "Data-parallel ranks of all workers known, where requests can be put", ["pool"])
APPROXIMATE = Gauge("headrace_router_approximate_workers", "Workers whose cache is guessed from placements", ["pool"])
INDEX_ENTRIES = Gauge("headrace_router_index_entries", "Blocks in the index, counted once per worker and tier", ["pool"])
INDEX_READY = Gauge("headrace_router_index_ready", "1 while the index has caught up with the stream", ["pool"])
INDEX_WAITS = Counter("headrace_router_index_not_awaited_total", "Starts of work before the index had caught up")
LAG = Gauge("headrace_router_stream_lag", "Cache events stored and not applied yet", ["pool"])
REPORTS = Counter("headrace_router_load_reports_total", "Load reports read")
JOB_EVENTS = Counter("headrace_router_job_events_total", "Job events read", ["kind"])

OVERLAP_FOUND = Counter(
    "headrace_router_overlap_found_tokens_total", "Prompt tokens predicted to be in the chosen worker's cache"
)
OVERLAP_LOST = Counter("headrace_router_overlap_lost_tokens_total", "Of those, tokens that had to be computed all the same")
OVERLAP_GAINED = Counter("headrace_router_overlap_gained_tokens_total", "Tokens that were in the cache and not in the index")
TTFT_PREDICTED_S = Histogram(
    "headrace_router_ttft_predicted_seconds",
    "Predicted time from arrival to the first token",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
TTFT_ACTUAL_S = Histogram(
    "headrace_router_ttft_actual_seconds",
    "Measured time from arrival to the end of the prefill, of the same requests",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
TTFT_ERROR_S = Histogram(
    "headrace_router_ttft_error_seconds",
    "How far the prediction was off, either way",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
SUSPECTS_HELD_S = Histogram(
    "headrace_router_suspects_held_seconds",
    "How long suspects waited for lost workers that were due back, before their trial",
    buckets=(0.1, 0.2, 0.5, 1, 2, 3, 5),
)
LEASE_LAPSES = Counter("headrace_router_lease_lapses_total", "Times this router was fenced because its lease ran out")

# Counted for every request: finding a labelled metric costs more than counting.
RECEIVED_OF = {request_class: RECEIVED.labels(request_class) for request_class in REQUEST_CLASSES}
placed = cache(PLACED.labels)
JOB_EVENTS_OF = {kind: JOB_EVENTS.labels(kind) for kind in ("placed", "started", "prefilled", "settled", "moved")}

_tenants: set[str] = set()


def tenant_label(tenant: str) -> str:
    """Return the label of a tenant: its own name for the first `MAX_TENANTS`, a common one for all others."""
    if tenant in _tenants:
        return tenant
    if len(_tenants) < MAX_TENANTS:
        _tenants.add(tenant)
        return tenant
    return OTHER_TENANTS


CLOSE = 0.2  # part of the measured time
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

DECISIONS = Counter("headrace_global_decisions_total", "Placements in pools with several fleets", ["pool", "fleet", "reason"])
FLEET_TTFT_PREDICTED_S = Histogram(
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
FLEET_TTFT_ERROR_S = Histogram(
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
    DECISIONS.labels(pool, decision.fleet, decision.reason).inc()


def compare(fleet: str, *, target_s: float, predicted_s: float, observed_s: float) -> None:
    FLEET_TTFT_PREDICTED_S.labels(fleet).observe(predicted_s)
    TTFT_OBSERVED_S.labels(fleet).observe(observed_s)
    off_s = abs(observed_s - predicted_s)
    FLEET_TTFT_ERROR_S.labels(fleet).observe(off_s)
    PREDICTIONS.labels(fleet, "yes" if off_s <= CLOSE * observed_s else "no").inc()
    TARGETS.labels(fleet, "yes" if observed_s <= target_s else "no").inc()


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
        request, chosen = placement.request, placement.fleet
        fleet, target_s = ("", request.ttft_target_s) if chosen is None else (chosen.fleet, chosen.ttft_target_s)
        self._open[request.id, request.attempt] = _Prediction(
            placement.uncached, request.tokens, request.arrived_s, placement.predicted_ttft_s, fleet, target_s
        )
        if len(self._open) > LIMIT:
            del self._open[next(iter(self._open))]
        OVERLAP_FOUND.inc(max(0, request.tokens - placement.uncached))

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Compare at `prefilled`. Its attempt is forgotten then, and at `settled` and `moved`; no other event may come here."""
        predicted = self._open.pop((event.id, event.attempt), None)
        if predicted is None or event.kind != "prefilled":
            return
        missed = event.uncached - predicted.uncached
        (OVERLAP_LOST if missed > 0 else OVERLAP_GAINED).inc(abs(missed))
        actual_s = max(0.0, now_s - predicted.arrived_s)
        TTFT_PREDICTED_S.observe(predicted.ttft_s)
        TTFT_ACTUAL_S.observe(actual_s)
        TTFT_ERROR_S.observe(abs(actual_s - predicted.ttft_s))
        if predicted.target_s is not None:
            compare(predicted.fleet, target_s=predicted.target_s, predicted_s=predicted.ttft_s, observed_s=actual_s)


log = structlog.get_logger()


class SuspectWaits:
    """Times the waits of one router's window. Times are seconds of the caller's clock."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._began_s: float | None = None

    def note(self, suspects: int, now_s: float) -> None:
        """Note the number of waiting suspects. The first of them begins a wait, an empty queue ends it."""
        if suspects and self._began_s is None:
            self._began_s = now_s
            log.warning("suspects.held", pool=self._pool, suspects=suspects, reason="lost workers are due back")
        elif not suspects and self._began_s is not None:
            waited_s, self._began_s = now_s - self._began_s, None
            SUSPECTS_HELD_S.observe(waited_s)
            log.info("suspects.released", pool=self._pool, waited_s=round(waited_s, 3))
