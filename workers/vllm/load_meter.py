"""Measures vLLM's load from the statistics that its scheduler reports after every step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from headrace.workers.engine import EngineSteps, Fault, Load, Output, Sequence, Sink
from headrace.workers.kit import summed


@dataclass(slots=True)
class RankStep:
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
        step = self._ranks.setdefault(rank, RankStep())
        self._computed += step.note(stats)
        self._computed = max(0, self._computed - self._settled) if self._queue else 0
        self._settled = 0

    @property
    def step_s(self) -> float:
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
        each = blocks // ranks
        if mine == 0:
            for step in steps:
                step.last = None
            held = [round(step.cache_usage * each) if self.holds else 0 for step in steps]
            return summed((Load(blocks_used=used, blocks_total=each) for used in held), mine=0, blocks=blocks, queued=0)
        queued = max(0, self._queued - max(0, self._computed - self._settled))
        return summed((step.load(each, queued // ranks) for step in steps), mine=mine, blocks=blocks, queued=queued)

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


LOG_EVERY_S = 10.0


def shows_metrics(args: Mapping[str, Any]) -> bool:
    """Return whether vLLM's series are on `/metrics`: unless `disable_log_stats=true` was given, which means both in vLLM."""
    return args.get("disable_log_stats") is not True


def no_prometheus() -> Any:
    """Return the stat logger that takes the place of vLLM's for Prometheus, which vLLM adds by itself, and shows nothing."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class NoPrometheus(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is untyped to us
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def record(self, *_stats: Any, **_more: Any) -> None:
            """Show nothing."""

        def log_engine_initialized(self) -> None:
            """Show nothing."""

        def record_sleep_state(self, *_state: Any, **_more: Any) -> None:
            """Show nothing."""

    return NoPrometheus


class StatsLog:
    """Has vLLM write its log lines of statistics, which it does when it is told to, until closed."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)

    def _write(self) -> None:
        if self._llm.logger_manager is not None:
            self._llm.logger_manager.log()
        self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)

    def close(self) -> None:
        self._timer.cancel()


# Batches the deltas of an engine step for many sequences into one call of the sink.
#
# vLLM puts each request's delta into that request's own collector, all of a step without yielding to the event loop, and of
# several steps where that was late. They are taken there instead of waking a task per request: the first delta schedules the
# call of the sink, which finds them all.

_log = structlog.get_logger()


class EngineRequest:
    """A sequence inside the engine; `request_id` is vLLM's id of it, `started` whether it has had an output.

    `token_ids` is its prompt as vLLM has it, with what an earlier run had emitted; `prompt_tokens` is known of media only.
    """

    __slots__ = ("closed", "prompt_tokens", "request_id", "sequence", "started", "token_ids")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.request_id = sequence.id
        self.token_ids = sequence.token_ids
        self.prompt_tokens: int | None = None
        self.started = False
        self.closed = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHandlers:
    """The engine's handlers for deltas: conversion, vLLM's exceptions, and the end of a sequence by its id."""

    convert: Callable[[EngineRequest, Any], Output]
    on_error: Callable[[EngineRequest, Exception], Output | None]
    on_end: Callable[[str], None]


class StepBatcher:
    """Turns deltas into one sink call per engine step. Used on the event loop only."""

    def __init__(
        self,
        sink: Sink,
        handlers: DeltaHandlers,
    ) -> None:
        self._steps = EngineSteps(sink)
        self._convert = handlers.convert
        self._on_error = handlers.on_error
        self._on_end = handlers.on_end

    def attach(self, collector: Any, run: EngineRequest) -> None:
        """Consume the contents of vLLM's `collector`, now and from now on."""

        def put(item: Any) -> None:
            self.take(run, item)

        try:
            early = collector.get_nowait()
        except Exception as error:
            early = error
        collector.put = put
        if early is not None:
            self.take(run, early)

    def take(self, run: EngineRequest, item: Any) -> None:
        """Add one delta, or the exception vLLM ended this request with."""
        if run.closed:
            return
        if isinstance(item, Exception):
            output = self._on_error(run, item)
        else:
            output = self._converted(run, item)
            run.started = True
        if output is None or output.finish is not None or output.fault is not None:
            run.closed = True
            self._on_end(run.sequence.id)
        if output is not None:
            self._steps.add(output)

    def _converted(self, run: EngineRequest, item: Any) -> Output:
        try:
            return self._convert(run, item)
        except Exception as error:
            # This runs inside vLLM's output loop, where an exception would end the engine for all requests.
            _log.exception("engine.output_unreadable", sequence=run.sequence.id)
            message = f"vLLM's output cannot be read: {error!r}"
            return Output(run.sequence.id, [], fault=Fault("engine_error", message, retriable=False))

    def drop(self, ids: frozenset[str]) -> None:
        """Drop the batched outputs of these sequences, so that none of them reaches the sink any more."""
        self._steps.drop(ids)
