"""Prometheus metrics of the worker runtime."""

from __future__ import annotations

from functools import cache

from headrace.base.metrics import Counter, Gauge, Histogram
from headrace.broker.metrics import BoundedLabel

TOKENS = Counter("headrace_worker_tokens_total", "Tokens of finished choices", ["kind"])
PROMPT_TOKENS, COMPLETION_TOKENS = TOKENS.labels("prompt"), TOKENS.labels("completion")
POOLED = Counter("headrace_worker_pooled_total", "Inputs of which a vector was made", ["task"])
PARSED = Counter(
    "headrace_worker_parsed_total",
    "Streamed answers that were taken apart, by how they compare with the same answer taken apart as a whole: same, "
    "completed (its end came late), differs",
    ["outcome"],
)
UNREADABLE = Counter("headrace_worker_unreadable_total", "Answers on which the parser for tool calls or reasoning failed")
RESUMED = Counter("headrace_worker_resumed_total", "Runs continued from tokens that another run had emitted")
PARKED = Counter("headrace_worker_parked_total", "Runs stopped in the engine because the lease was lost for too long")
MEDIA_S = Histogram(
    "headrace_worker_media_seconds",
    "Time from a request's media as bytes to a prompt that the engine takes",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
MEDIA_UNEXPECTED = Counter(
    "headrace_worker_media_unexpected_total", "Prompts whose media take other tokens in the engine than the model's card says"
)
STALLS = Counter("headrace_worker_engine_stalls_total", "Times the engine had work and reported nothing for too long")
STALL_LIMIT_S = Gauge(
    "headrace_worker_stall_limit_seconds", "Time without a report after which an engine with work counts as dead"
)
STUCK = Counter(
    "headrace_worker_stuck_sequences_total", "Sequences that got no token for too long while others did", ["waits_for"]
)
CANARIES = Counter("headrace_worker_canaries_total", "Requests of our own to an idle engine, by what came of them", ["result"])
READY = Gauge("headrace_worker_ready", "1 while this worker is registered")
ENGINE_START_S = Gauge("headrace_worker_engine_start_seconds", "Time the engine took to start, warm-up included")
FIRST_TOKEN_S = Histogram(
    "headrace_worker_first_token_seconds",
    "Time from the start of a run to its first token",
    buckets=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
PREFILLS = Counter("headrace_worker_prefills_total", "Prompts by where they are computed and why", ["where", "reason"])
MOST_REASONS = 32
_reasons = BoundedLabel(MOST_REASONS)  # of prefills: they come from routers, in a header


@cache  # looking labels up costs several times what counting does
def _prefills(where: str, reason: str) -> Counter:
    return PREFILLS.labels(where, reason)


def prefills(where: str, reason: str) -> Counter:
    """Return the counter of prompts computed there for this reason."""
    return _prefills(where, _reasons.of(reason))


PREFILL_FAILURES = Counter(
    "headrace_worker_prefill_failures_total", "Prompts that another worker was to compute, and did not", ["reason"]
)
PREFILLED_TOKENS = Counter("headrace_worker_prefilled_tokens_total", "Prompt tokens of jobs of the prefill queue", ["kind"])
PREFIX_READS = Counter(
    "headrace_worker_prefix_reads_total",
    "Prefixes that decode workers lent to this prefill worker: read, not needed or not readable here, or the read failed",
    ["outcome"],
)
PREFIX_LOANS = Counter(
    "headrace_worker_prefix_loans_total", "Prefixes in this decode worker's cache that prefill workers may read", ["outcome"]
)
HANDOVER_S = Histogram(
    "headrace_worker_handover_seconds",
    "Parts of a remote prefill: in the queue, in the prefill engine, and from its blocks being ready to the first token here",
    ["part"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
HANDOVER_TOKENS = Counter("headrace_worker_handover_tokens_total", "Tokens whose KV blocks were fetched from another worker")
EMBEDDINGS = Counter(
    "headrace_worker_embeddings_total",
    "Media items of requests, by where their embeddings came from: kept by this worker, the store, an encode worker (by the "
    "store or read by NIXL), or the engine here",
    ["source"],
)
EMBEDDING_FAILURES = Counter(
    "headrace_worker_embedding_failures_total", "Embeddings of media that were to come from elsewhere, and did not", ["reason"]
)
EMBEDDING_S = Histogram(
    "headrace_worker_embedding_seconds",
    "Time that a request waited for the embeddings of its media",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
ENCODES = Counter(
    "headrace_worker_encodes_total", "Media items that an encode worker was asked for, by what became of them", ["result"]
)
ENCODE_S = Histogram(
    "headrace_worker_encode_seconds",
    "Time that the encoder took for a media item",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
KV_BLOCKS = Gauge("headrace_worker_kv_blocks", "Blocks that the engine has cached, read at each scrape", ["tier", "rank"])
KV_MESSAGES = Counter("headrace_worker_kv_messages_total", "Messages stored in the KV stream", ["kind"])
KV_WAITING = Gauge("headrace_worker_kv_waiting", "Changes of blocks that wait to be published", ["rank"])
KV_OK = Gauge("headrace_worker_kv_ok", "1 while cache events are published, 0 while that fails", ["rank"])
ENGINE_RUNNING = Gauge("headrace_worker_engine_running", "Sequences that the engine computes, by data-parallel rank", ["rank"])
ENGINE_WAITING = Gauge("headrace_worker_engine_waiting", "Sequences that wait inside the engine", ["rank"])
ENGINE_BLOCKS_USED = Gauge("headrace_worker_engine_blocks_used", "KV blocks that sequences of the engine hold", ["rank"])
ENGINE_BLOCKS = Gauge("headrace_worker_engine_blocks", "KV blocks that the engine has", ["rank"])
KV_FAILURES = Counter("headrace_worker_kv_publish_failures_total", "Tries to publish cache events that failed", ["error"])
KV_SKIPPED = Counter("headrace_worker_kv_skipped_total", "Messages that could not be stored; readers see a gap and a reset")
KV_TROUBLE = Counter("headrace_worker_kv_trouble_total", "What went wrong between the engine and its inventory", ["what"])
