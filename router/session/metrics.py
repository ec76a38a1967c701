"""Prometheus metrics of a router.

Tenants come from clients, so only the first `MAX_TENANTS` of a process get a label of their own.
"""

from __future__ import annotations

from headrace.base.metrics import Counter, Gauge, Histogram
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
JOB_EVENTS_OF = {kind: JOB_EVENTS.labels(kind) for kind in ("placed", "started", "prefilled", "settled", "moved")}

_tenants: set[str] = set()


def count_prefill(placement: Placement) -> None:
    """Count where the prompt of this placement is computed, in pools that have a choice."""
    if placement.prefill is not None:
        PREFILL.labels("remote" if placement.remote else "local", placement.prefill.reason).inc()


def tenant_label(tenant: str) -> str:
    """Return the label of a tenant: its own name for the first `MAX_TENANTS`, a common one for all others."""
    if tenant in _tenants:
        return tenant
    if len(_tenants) < MAX_TENANTS:
        _tenants.add(tenant)
        return tenant
    return OTHER_TENANTS
