"""How busy vLLM is, from what its scheduler says after every step."""

from __future__ import annotations

import time
from typing import Any

from workers.engine import Load


class LoadMeter:
    """Remembers the scheduler's last words. `factory()` is what vLLM takes as a stat logger."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.cache_usage = 0.0
        self.step_s = 0.0
        self._last: float | None = None

    def note(self, stats: Any) -> None:
        """Take one step's `SchedulerStats`. The time between two steps of a busy engine is the time a step takes."""
        now = time.monotonic()
        if self._last is not None:
            self.step_s = now - self._last
        self.running = stats.num_running_reqs
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.cache_usage = stats.kv_cache_usage
        self._last = now if self.running else None

    def read(self, *, mine: int, blocks: int, queued_tokens: int) -> Load:
        """`mine` is how many sequences are known to be in the engine: an idle one makes no steps, its last words grow old."""
        if mine == 0:
            self._last = None
            return Load(blocks_total=blocks)
        running = min(self.running, mine)
        return Load(
            running=running,
            waiting=max(self.waiting, mine - running),
            blocks_used=round(self.cache_usage * blocks),
            blocks_total=blocks,
            queued_prefill_tokens=queued_tokens,
            step_s=self.step_s,
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
