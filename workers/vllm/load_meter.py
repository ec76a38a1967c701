"""Measures vLLM's load from the statistics that its scheduler reports after every step."""

from __future__ import annotations

import time
from typing import Any

from headrace.workers.engine import Load


class LoadMeter:
    """Keeps the scheduler's last statistics. `factory()` returns the stat logger for vLLM.

    vLLM does not report how many prompt tokens are still to be computed, so they are counted here: the tokens of submitted
    sequences without a token, less those expected in the cache, less those that the steps since have computed.
    """

    def __init__(self) -> None:
        self.holds = False  # whether blocks may stay in use without a sequence: offered, or waiting to be written
        self.running = 0
        self.waiting = 0
        self.cache_usage = 0.0
        self.step_s = 0.0
        self.step_prefill_tokens = 0
        self.step_decodes = 0
        self._last: float | None = None
        self._queue: dict[str, int] = {}  # prompt tokens to be computed, by sequence without a token
        self._queued = 0
        self._computed = 0  # those of `_queued` that steps have computed so far
        self._settled = 0  # computed for sequences that got their first token in the step that is being reported

    def note(self, stats: Any) -> None:
        """Record a step's `SchedulerStats`. The time between two steps of a busy engine is the duration of a step."""
        now = time.monotonic()
        details = stats.iteration_details
        if details is not None:
            self.step_prefill_tokens = details.num_ctx_tokens
            self.step_decodes = details.num_generation_requests
            self._computed += details.num_ctx_tokens
        if self._last is not None:
            self.step_s = now - self._last
        elif details is not None and details.elapsed_ms:
            self.step_s = details.elapsed_ms / 1000
        self._computed = max(0, self._computed - self._settled) if self._queue else 0
        self._settled = 0
        self.running = stats.num_running_reqs
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.cache_usage = stats.kv_cache_usage
        self._last = now if self.running else None

    def queued(self, sequence_id: str, tokens: int) -> None:
        """Record a submitted sequence, of which `tokens` have to be computed."""
        if not self._queue:
            self._computed = self._settled = 0
        self._queue[sequence_id] = tokens
        self._queued += tokens

    def prefilled(self, sequence_id: str, computed: int) -> None:
        """Record the first token of a sequence, for which `computed` tokens were computed."""
        if self.gone(sequence_id):
            self._settled += computed

    def gone(self, sequence_id: str) -> bool:
        """Remove a sequence from the queue. Returns whether it was queued."""
        tokens = self._queue.pop(sequence_id, None)
        self._queued -= tokens or 0
        return tokens is not None

    def read(self, *, mine: int, blocks: int) -> Load:
        """Return the load. `mine` is the number of sequences in the engine, as the last statistics of an idle one are stale.

        An engine that holds blocks for others makes steps until they are free, so its number of used blocks is current.
        """
        if mine == 0:
            self._last = None
            return Load(blocks_used=round(self.cache_usage * blocks) if self.holds else 0, blocks_total=blocks)
        running = min(self.running, mine)
        return Load(
            running=running,
            waiting=max(self.waiting, mine - running),
            blocks_used=round(self.cache_usage * blocks),
            blocks_total=blocks,
            queued_prefill_tokens=max(0, self._queued - max(0, self._computed - self._settled)),
            step_s=self.step_s,
            step_prefill_tokens=self.step_prefill_tokens,
            step_decodes=self.step_decodes,
        )

    def factory(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        meter = self

        class StepListener(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped to us
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Accept vLLM's arguments, of which none is needed."""

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                if scheduler_stats is not None:
                    meter.note(scheduler_stats)

            def log_engine_initialized(self) -> None:
                """Log nothing: the worker logs its own start."""

        return StepListener
