"""Prometheus metrics of the worker runtime."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

TOKENS = Counter("headrace_worker_tokens_total", "Tokens of finished choices", ["kind"])
RESUMED = Counter("headrace_worker_resumed_total", "Runs continued from tokens that another run had emitted")
PARKED = Counter("headrace_worker_parked_total", "Runs stopped in the engine because the lease was lost for too long")
STALLS = Counter("headrace_worker_engine_stalls_total", "Times the engine had work and reported nothing for too long")
READY = Gauge("headrace_worker_ready", "1 while this worker is registered")
ENGINE_START_S = Gauge("headrace_worker_engine_start_seconds", "Time the engine took to start, warm-up included")
FIRST_TOKEN_S = Histogram(
    "headrace_worker_first_token_seconds",
    "Time from the start of a run to its first token",
    buckets=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
