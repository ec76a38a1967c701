"""The growing result of a request, and the iterators over what the engine reports by itself."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from .utils import RequestError


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = field(default_factory=list)
    prompt_logprobs: list[Any] | None = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None


@dataclass(slots=True, kw_only=True)
class Response:
    """What one step has brought for one request; `error` ends it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish: str | None = None
    stop: int | None = None
    cached: int = 0
    disagg: Any = None
    logits: Any = None
    error: Exception | None = None


class GenerationResult:
    """Awaitable and async iterable; each step changes and yields the same object."""

    def __init__(self, number: int, prompt: list[int], params: Any, *, streaming: bool, abort: Callable[[int], None]) -> None:
        self.id = self.request_id = number
        self.prompt_token_ids = prompt
        self.sampling_params = params
        self._outputs = [CompletionOutput(0)]
        self.context_logits = None
        self.cached_tokens = 0
        self.disaggregated_params = None
        self.mm_embedding_handle: dict[str, Any] | None = None
        self._streaming = streaming
        self._abort = abort
        self._aborted = False
        self._done = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
            self._responses: Any = asyncio.Queue()
        except RuntimeError:
            self._loop, self._responses = None, queue.Queue()

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._aborted = True
        self._abort(self.request_id)

    def aborted(self) -> bool:
        return self._aborted

    def put(self, response: Response) -> None:
        """Add a response, from the engine's thread."""
        if self._loop is None:
            self._responses.put(response)
            return
        try:
            self._loop.call_soon_threadsafe(self._responses.put_nowait, response)
        except RuntimeError:  # the loop is closed
            self._done = True

    def _handle(self, response: Response) -> None:
        if response.error is not None:
            if not isinstance(response.error, RequestError):
                self._done = True
            raise response.error
        output = self.outputs[0]
        self.cached_tokens = response.cached
        output.token_ids += response.tokens  # type: ignore[operator]
        output.logprobs += response.logprobs  # type: ignore[operator]
        if response.disagg is not None:
            self.disaggregated_params = output.disaggregated_params = response.disagg
        if response.finish is not None:
            output.finish_reason, output.stop_reason = response.finish, response.stop
            output.generation_logits = response.logits
            self._done = True

    def result(self, timeout: float | None = None) -> GenerationResult:
        while not self._done:
            self._handle(self._responses.get(timeout=timeout))
        return self

    async def aresult(self) -> GenerationResult:
        while not self._done:
            self._handle(await self._responses.get())
        return self

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self.aresult().__await__()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        self._handle(await self._responses.get())
        return self


class Reports:
    """What an engine reports by itself, bounded: the oldest go when nothing reads them."""

    def __init__(self, most: int) -> None:
        self.items: deque[dict[str, Any]] = deque(maxlen=max(1, most))
        self.done = False


class IterationResult:
    """An iterator that ends after `timeout` seconds without an item. In 1.2 it then stays ended until it is marked."""

    def __init__(self, reports: Reports, timeout: float | None, *, sticky: bool) -> None:
        self._reports = reports
        self._timeout = timeout
        self._sticky = sticky
        if not sticky:
            reports.done = False

    def mark_undone(self) -> None:
        self._reports.done = False

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._reports.done:
            raise StopAsyncIteration
        if not self._reports.items and self._timeout:
            await asyncio.sleep(self._timeout)
        if not self._reports.items:
            self._reports.done = True
            raise StopAsyncIteration
        return self._reports.items.popleft()
