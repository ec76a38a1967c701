"""Measures vLLM's load from the statistics that its scheduler reports after every step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from headrace.workers.engine import Load


@dataclass(slots=True)
class RankStep:
    """The last step of a data-parallel rank."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    step_s: float = 0.0
    prefill_tokens: int = 0
    decodes: int = 0
    last: float | None = None  # when it ended, while the rank is busy

    def note(self, stats: Any) -> int:
        """Record a step, and return the prompt tokens that it computed.

        The time between two steps of a busy rank is the duration of a step, but at least the time that vLLM's core waited for
        the step's results: reports of two steps may be read at once, and the second step would seem to have taken no time.
        """
        now = time.monotonic()
        details = stats.iteration_details
        waited_s = details.elapsed_ms / 1000 if details is not None else 0.0
        if details is not None:
            self.prefill_tokens = details.num_ctx_tokens
            self.decodes = details.num_generation_requests
        if self.last is not None:
            self.step_s = max(now - self.last, waited_s)
        elif waited_s:
            self.step_s = waited_s
        self.running = stats.num_running_reqs
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.cache_usage = stats.kv_cache_usage
        self.last = now if self.running else None
        return details.num_ctx_tokens if details is not None else 0

    def load(self, blocks: int, queued: int) -> Load:
        """Return the load of the rank, of whose `blocks` some are used; `queued`: its part of the prompt tokens."""
        return Load(
            running=self.running,
            waiting=self.waiting,
            blocks_used=round(self.cache_usage * blocks),
            blocks_total=blocks,
            queued_prefill_tokens=queued,
            step_s=self.step_s,
            step_prefill_tokens=self.prefill_tokens,
            step_decodes=self.decodes,
        )


class LoadMeter:
    """Keeps the schedulers' last statistics. `factory()` returns the stat logger for vLLM.

    vLLM does not report how many prompt tokens are still to be computed, so they are counted here: the tokens of submitted
    sequences without a token, less those expected in the cache, less those that the steps since have computed.
    """

    def __init__(self) -> None:
        self.holds = False  # whether blocks may stay in use without a sequence: offered, or waiting to be written
        self._ranks: dict[int, RankStep] = {}
        self._queue: dict[str, int] = {}  # prompt tokens to be computed, by sequence without a token
        self._queued = 0
        self._computed = 0  # those of `_queued` that steps have computed so far
        self._settled = 0  # computed for sequences that got their first token in the step that is being reported

    def note(self, stats: Any, rank: int = 0) -> None:
        """Record the `SchedulerStats` of a step of a data-parallel rank."""
        step = self._ranks.setdefault(rank, RankStep())
        self._computed += step.note(stats)
        self._computed = max(0, self._computed - self._settled) if self._queue else 0
        self._settled = 0

    @property
    def step_s(self) -> float:
        """Return the duration of the longest last step of a rank."""
        return max((step.step_s for step in self._ranks.values()), default=0.0)

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

    def read(self, *, mine: int, blocks: int, ranks: int = 1) -> Load:
        """Return the load. `mine` is the number of sequences in the engine, as the last statistics of an idle one are stale.

        An engine that holds blocks for others makes steps until they are free, so its number of used blocks is current.
        `blocks` are those of all `ranks`.
        """
        known = self._ranks
        # One rank of several that are engines of their own has its number among them.
        steps = [known.setdefault(rank, RankStep()) for rank in range(ranks)] if ranks > 1 else list(known.values())[:1]
        used = sum(round(step.cache_usage * (blocks // ranks)) for step in steps)
        if mine == 0:
            for step in steps:
                step.last = None
            idle = [round(step.cache_usage * (blocks // ranks)) if self.holds else 0 for step in steps]
            each = tuple(Load(blocks_used=held, blocks_total=blocks // ranks) for held in idle) if ranks > 1 else ()
            return Load(blocks_used=used if self.holds else 0, blocks_total=blocks, ranks=each)
        running = min(sum(step.running for step in steps), mine)
        queued = max(0, self._queued - max(0, self._computed - self._settled))
        return Load(
            running=running,
            waiting=max(sum(step.waiting for step in steps), mine - running),
            blocks_used=used,
            blocks_total=blocks,
            queued_prefill_tokens=queued,
            step_s=self.step_s,
            step_prefill_tokens=sum(step.prefill_tokens for step in steps),
            step_decodes=sum(step.decodes for step in steps),
            ranks=tuple(step.load(blocks // ranks, queued // ranks) for step in steps) if ranks > 1 else (),
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
                    meter.note(scheduler_stats, engine_idx)

            def log_engine_initialized(self) -> None:
                """Log nothing: the worker logs its own start."""

        return StepListener
