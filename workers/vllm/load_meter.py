"""How busy vLLM is, from what its scheduler says after every step."""

from __future__ import annotations

import time
from typing import Any

from headrace.workers.engine import Load


class LoadMeter:
    """Remembers the scheduler's last words. `factory()` is what vLLM takes as a stat logger.

    vLLM does not tell how much of the prompts inside is still to be computed, so that is kept here: what was submitted and has
    no token yet, less what the cache is expected to have, less what the steps since have computed of it.
    """

    def __init__(self) -> None:
        self.holds = False  # whether blocks may stay taken without a sequence inside: on offer, or waiting to be written
        self.running = 0
        self.waiting = 0
        self.cache_usage = 0.0
        self.step_s = 0.0
        self.step_prefill_tokens = 0
        self.step_decodes = 0
        self._last: float | None = None
        self._queue: dict[str, int] = {}  # prompt tokens to be computed, by sequence without a token
        self._queued = 0
        self._computed = 0  # … of these, by steps so far
        self._settled = 0  # computed for sequences that got their first token in the step that is being reported

    def note(self, stats: Any) -> None:
        """Take one step's `SchedulerStats`. The time between two steps of a busy engine is the time a step takes."""
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
        """A sequence was submitted; so many of its tokens will have to be computed."""
        if not self._queue:
            self._computed = self._settled = 0
        self._queue[sequence_id] = tokens
        self._queued += tokens

    def prefilled(self, sequence_id: str, computed: int) -> None:
        """It has its first token; so many were computed for it."""
        if self.gone(sequence_id):
            self._settled += computed

    def gone(self, sequence_id: str) -> bool:
        """It is not queued any more; True if it was."""
        tokens = self._queue.pop(sequence_id, None)
        self._queued -= tokens or 0
        return tokens is not None

    def read(self, *, mine: int, blocks: int) -> Load:
        """`mine` is how many sequences are known to be in the engine: an idle one makes no steps, its last words grow old.

        One that holds blocks for others goes on making steps until they are free, so what it says of blocks is true.
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
                """vLLM constructs it; there is nothing to keep."""

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                if scheduler_stats is not None:
                    meter.note(scheduler_stats)

            def log_engine_initialized(self) -> None:
                """Nothing to say: the worker logs its own start."""

        return StepListener
