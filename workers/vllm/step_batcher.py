"""Batches the deltas of an engine step for many sequences into one call of the sink.

vLLM puts each request's delta into that request's own collector, all of a step without yielding to the event loop, and of
several steps where that was late. They are taken there instead of waking a task per request: the first delta schedules the call
of the sink, which finds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from headrace.workers.engine import Fault, Output, Sequence, Sink
from headrace.workers.engine_steps import EngineSteps

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
        """Take what is in vLLM's `collector` now and everything put into it from now on."""

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
