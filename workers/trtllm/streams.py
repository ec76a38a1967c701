"""Reads the results of all requests and gives what one engine step has brought to the sink in one call.

TensorRT-LLM has an async iterator per request. One task reads each; what all of them have read in one turn of the event loop
leaves together, and apart where that turn has found several steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.workers.engine import EngineSteps, Output, Sink
from headrace.workers.trtllm.convert import Model, ReadProgress, to_output


@dataclass(slots=True)
class StreamedRequest:
    """A sequence inside the engine: its result, how far that was read, and the task that reads it."""

    progress: ReadProgress
    result: Any
    task: asyncio.Task[None] | None = None
    closed: bool = field(default=False)

    @property
    def id(self) -> str:
        return self.progress.sequence.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """The engine's handlers: of an exception in place of a result, of a first output, and of an end."""

    on_error: Callable[[StreamedRequest, Exception], Output | None]
    on_first: Callable[[StreamedRequest], None]
    on_end: Callable[[StreamedRequest, Output | None], None]


class ResultStreams:
    """The readers of all running requests. Used on the event loop only."""

    def __init__(self, sink: Sink, model: Model, handlers: Handlers) -> None:
        self._model = model
        self._handlers = handlers
        self._steps = EngineSteps(sink)
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, request: StreamedRequest) -> None:
        """Read a request's result until its end."""
        request.task = asyncio.create_task(self._read(request), name=f"trtllm-{request.id}")
        self._tasks.add(request.task)
        request.task.add_done_callback(self._tasks.discard)

    def give(self, output: Output) -> None:
        self._steps.add(output)

    def drop(self, requests: list[StreamedRequest]) -> None:
        """Stop reading these; nothing of them reaches the sink any more."""
        ids = {request.id for request in requests}
        for request in requests:
            request.closed = True
            if request.task is not None:
                request.task.cancel()
        self._steps.drop(ids)

    async def close(self) -> None:
        """Stop reading all, and wait for the readers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._steps.clear()

    async def _read(self, request: StreamedRequest) -> None:
        try:
            async for result in request.result:
                output = to_output(request.progress, result, self._model)
                if request.closed:
                    return
                if output is not None and self._deliver(request, output):
                    return
            if not request.closed:
                raise RuntimeError("the result ended without a finish reason")
        except Exception as error:
            if not request.closed:
                request.closed = True
                last = self._handlers.on_error(request, error)
                self._handlers.on_end(request, last)
                if last is not None:
                    self.give(last)

    def _deliver(self, request: StreamedRequest, output: Output) -> bool:
        self._handlers.on_first(request)
        ended = output.finish is not None or output.fault is not None
        if ended:
            request.closed = True
            self._handlers.on_end(request, output)
        self.give(output)
        return ended
