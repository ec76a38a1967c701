"""Defines the Prometheus metrics of batches."""

from __future__ import annotations

from headrace.base.metrics import Counter, Gauge

CARRIED = Gauge("headrace_batch_carried", "Batches that this frontend carries on")
TAKEN = Counter("headrace_batch_taken_total", "Batches taken over from a frontend that is gone")
GIVEN_UP = Counter("headrace_batch_given_up_total", "Batches that this frontend gave up because it drains")
ENDED = Counter("headrace_batch_ended_total", "Batches that this frontend has ended, by their status", ["status"])
LINES = Counter("headrace_batch_lines_total", "Lines of batches by what this frontend did with them", ["what"])
RETRIES = Counter("headrace_batch_retries_total", "Steps of a batch that failed and are done again", ["why"])
NOT_COPIED = Counter(
    "headrace_batch_inputs_not_copied_total", "Input files without a copy on the local disk, read from the store"
)
NOT_KEPT = Counter(
    "headrace_batch_results_not_kept_total", "Batches whose results could not be kept on the local disk, and are read twice"
)
NOTICES = Counter("headrace_batch_webhooks_total", "Webhook calls about ends of batches by outcome", ["outcome"])
