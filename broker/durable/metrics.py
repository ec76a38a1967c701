"""Counts durable work for the process that carries it."""

from __future__ import annotations

from headrace.base.metrics import Counter, Gauge, Histogram

CARRIED = Gauge("headrace_jobs_carried", "Stored jobs that this process carries now", ["state"])
TAKEN = Counter("headrace_jobs_taken_total", "Deliveries of stored jobs that this process began to carry")
ADOPTED = Counter("headrace_jobs_adopted_total", "Stored jobs taken over at once from a frontend that is gone")
ENDED = Counter("headrace_jobs_ended_total", "Stored jobs whose result this process saw, by status", ["status"])
LEFT = Counter("headrace_jobs_left_total", "Deliveries given up without an end, by reason", ["reason"])
RETRIED = Counter("headrace_jobs_retried_total", "Submissions of stored jobs that are tried again, by reason", ["reason"])
ENTRIES = Counter("headrace_jobs_entries_total", "Entries appended to streams of jobs, by kind", ["kind"])
UNREADABLE_ENTRIES = Counter("headrace_jobs_unreadable_entries_total", "Entries of jobs that could not be decoded")
ENTRIES_LOST = Counter("headrace_jobs_entries_lost_total", "Times a writer found its entries gone from the damaged stream")
RESULTS = Counter("headrace_jobs_results_total", "Results by what became of them: stored, or another was first", ["outcome"])
SWEPT = Counter("headrace_jobs_swept_total", "Stored jobs ended without a carrier, by status", ["status"])
OVER_QUOTA = Counter(
    "headrace_jobs_over_quota_total", "Jobs refused by a frontend, or ended in the queue, by the quota", ["quota", "how"]
)
JOB_S = Histogram(
    "headrace_jobs_seconds",
    "Time from storing a job to its result",
    buckets=(0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800, 3600, 14400, 86400, 604800),
)
