"""Prometheus metrics of the job protocol for the process it runs in."""

from __future__ import annotations

from functools import cache

from headrace.base.metrics import Counter, Gauge, Histogram

# A label of metrics whose values come over the wire: the first ones have a series each, all later ones share one.

OTHER = "(other)"


class BoundedLabel:
    """The values that have a series of their own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: set[str] = set()

    def of(self, value: str) -> str:
        """Return the label of a value: itself or, once there are too many, `OTHER`."""
        if value in self._values:
            return value
        if len(self._values) >= self._most:
            return OTHER
        self._values.add(value)
        return value


LOG_LOST = Counter("headrace_log_lost_writes_total", "Writes to the log that were dropped because what reads it stands still")
MALFORMED = Counter("headrace_broker_malformed_total", "Messages that could not be decoded", ["kind"])
MALFORMED_KINDS = (
    *("batch", "cancel", "card", "command", "control", "event", "explanation", "frame"),
    *("load", "member", "prefill_job", "reply", "request", "subject", "work"),
)
FORGED = Counter("headrace_broker_forged_total", "Messages that their sender may not send", ["kind"])
FAILED_MESSAGES = Counter("headrace_broker_failed_messages_total", "Messages whose handling failed unforeseen", ["kind"])
MOVED = Counter("headrace_broker_moved_total", "Jobs moved to a new attempt", ["reason"])
MOVE_REASONS = ("worker_gone", "engine_died", "drain", "role", "sleep", "pause", "adapter", "displaced", "preempted")
UNREADABLE_CARDS = Counter("headrace_models_unreadable_cards_total", "Tries to read the files of a model card that failed")
NAMES_TAKEN = Counter("headrace_models_names_taken_total", "Names of models or aliases that another pool has already")
SUBMITTED = Counter("headrace_ingress_submitted_total", "Requests accepted into the queue", ["pool"])
submitted = cache(SUBMITTED.labels)
REFUSED = Counter("headrace_ingress_refused_total", "Requests not accepted", ["reason"])
ENDED = Counter(
    "headrace_ingress_ended_total", "Accepted requests by how they ended: answered, or an error's code", ["outcome"]
)
_outcomes = BoundedLabel(64)  # codes of errors, which workers and routers send
_ended = cache(ENDED.labels)


def count_end(code: str | None) -> None:
    """Count a request that ended in an error with this code or, None, with an answer."""
    _ended("answered" if code is None else _outcomes.of(code)).inc()


AWAITING_BROKER = Gauge("headrace_ingress_awaiting_broker_requests", "New requests that wait because the broker is away")
BROKER_AWAITED = Counter(
    "headrace_ingress_awaited_broker_total", "New requests that waited for the broker, by how that ended", ["outcome"]
)
HELD = Gauge("headrace_ingress_held_requests", "Requests that wait because no worker can take them")
HELD_ENDED = Counter("headrace_ingress_held_total", "Requests that waited for a worker, by how that ended", ["outcome"])
HELD_S = Histogram(
    "headrace_ingress_held_seconds",
    "Time that requests waited for a worker while there was none",
    buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
OPEN = Gauge("headrace_ingress_open_requests", "Requests accepted and not ended")
SPILLED_BYTES = Counter("headrace_ingress_spilled_bytes_total", "Bytes of payloads too large for a message that were stored")
SPILL_STORE_BYTES = Gauge("headrace_ingress_spill_store_bytes", "Bytes of all such payloads, when last looked at")
SPILL_REFUSED = Counter("headrace_ingress_spill_refused_total", "Requests refused because the store of large payloads is full")
STORE_REMOVED = Counter(
    "headrace_ingress_store_removed_total", "Stored answers or records that made room for others, by store", ["store"]
)
STORE_REMOVED_BYTES = Counter(
    "headrace_ingress_store_removed_bytes_total",
    "Bytes of stored answers or records that made room for others, by store",
    ["store"],
)
SPILLS_DELETED = Counter("headrace_ingress_spills_deleted_total", "Large payloads deleted, by why: ended, orphan", ["how"])
CANCELLED = Counter("headrace_ingress_cancelled_total", "Cancel broadcasts by cause", ["cause"])
RESUBMITTED = Counter("headrace_ingress_resubmitted_total", "Requests submitted again after this ingress lost its lease")
GAPS = Counter("headrace_ingress_token_gaps_total", "Times missing tokens were asked for", ["cause"])
FENCED = Counter("headrace_ingress_fenced_frames_total", "Rows that were not from the current run")
LEASE_LAPSES = Counter("headrace_broker_lease_lapses_total", "Times this process's lease had lapsed", ["role"])
LEASE_ROLES = ("ingress", "worker")
LEASES_REVOKED = Counter("headrace_broker_leases_revoked_total", "Leases of workers taken away because no process answered")
CLAIMS = Counter("headrace_worker_claims_total", "Claims by verdict", ["verdict"])
SUSPECTS = Counter(
    "headrace_worker_suspects_total", "Suspects by what happened: started apart or beside other jobs, cleared", ["how"]
)
RUNS = Gauge("headrace_worker_runs", "Runs held by this worker")
PLACED = Counter("headrace_worker_self_placed_total", "Jobs this worker placed on itself because there is no router")
FRAMES = Counter("headrace_worker_frames_total", "Token frames sent")
ROWS = Counter("headrace_worker_rows_total", "Rows sent in token frames")
SETTLED = Counter("headrace_worker_settled_total", "Runs by how they ended", ["how"])
settled = cache(SETTLED.labels)  # a label look-up costs several times as much as the count
PREEMPTED = Counter("headrace_worker_preempted_total", "Batch runs handed back because interactive work needed their place")
PREEMPTED_TOKENS = Counter("headrace_worker_preempted_tokens_total", "Tokens of preempted runs that have to be computed again")
UNKNOWN_RANKS = Counter(
    "headrace_worker_unknown_ranks_total", "Requests placed on a rank that this worker's engine does not have"
)
PREFILL_JOBS = Counter("headrace_worker_prefill_jobs_total", "Jobs of a prefill worker by how they ended", ["how"])
SUBMIT_S = Histogram(
    "headrace_ingress_submit_seconds",
    "Time from submit to the broker's ack",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)


def _show_from_start() -> None:
    """Make the series that alerts watch: Prometheus sees an increase only between two samples of a series."""
    for counter, values in ((MALFORMED, MALFORMED_KINDS), (MOVED, MOVE_REASONS), (LEASE_LAPSES, LEASE_ROLES)):
        for value in values:
            counter.labels(value)


_show_from_start()
