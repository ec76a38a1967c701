"""Reads the results of all requests and gives what one engine step has brought to the sink in one call.

TensorRT-LLM has an async iterator per request. One task reads each; what all of them have read in one turn of the event loop
leaves together, and apart where that turn has found several steps.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import EngineSteps, Output, Sink
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, TransferFailed
from headrace.workers.trtllm.convert import ENGINE_KEY, Model, ReadProgress, to_output

# Runs the encoder of a multimodal model by itself and hands its embeddings over to the context side.
#
# The embeddings stay in the encoder's GPU memory; what travels are handles to them, which only processes of the same machine
# can open, and hashes by which the context side caches. No role of a worker uses this yet.

HANDLES, HASHES = "multimodal_embedding_handles", "multimodal_hashes"
_HASH_NUMBERS = 8  # of 32 bits
_CARRIED = (HANDLES, HASHES, "mrope_position_ids_handle", "mrope_position_deltas_handle")


class MediaEncoder:
    """TensorRT-LLM's `MultimodalEncoder`. Started once, stopped once."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._encoder: Any = None

    async def start(self, model: str, args: Mapping[str, Any]) -> None:
        """Load the encoder's weights. Raises EngineStartFailed."""
        try:
            self._encoder = await run_in_thread(
                lambda: self._api.MultimodalEncoder(model=model, **args), name="trtllm-encoder-start"
            )
        except Exception as error:
            raise EngineStartFailed(f"TensorRT-LLM could not start the encoder of {model}: {error}") from error

    async def encode(self, prompt: str, media: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with which a context-only request uses the embeddings of `media`, by kind.

        Raises RequestInvalid for what the encoder refuses, EngineError for a failure.
        """
        if self._encoder is None:
            raise EngineError("the encoder is not running")
        try:
            result = await self._encoder.generate_async({"prompt": prompt, "multi_modal_data": dict(media)})
        except self._api.RequestError as error:
            raise EngineError(f"TensorRT-LLM could not encode: {error}") from error
        except (TypeError, ValueError) as error:
            raise RequestInvalid(str(error), param="messages") from error
        return plain_media(result)

    async def stop(self) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            await run_in_thread(encoder.shutdown, name="trtllm-encoder-stop")


def plain_media(result: Any) -> dict[str, Any]:
    """Return what an encoder has handed over, as numbers, texts, lists and maps. Raises EngineError if there is nothing."""
    params = getattr(result, "disaggregated_params", None)
    found = {name: getattr(params, name, None) for name in _CARRIED}
    handles = found[HANDLES]
    if isinstance(handles, tuple) and len(handles) == 1:  # a list inside a tuple, in 1.2
        handles = handles[0]
    if not handles:
        single = getattr(result, "mm_embedding_handle", None)
        handles = None if single is None else [single]
    if not handles:
        raise EngineError("TensorRT-LLM's encoder has handed nothing over")
    found[HANDLES] = handles
    return {"engine": ENGINE_KEY} | {name: _plain(value) for name, value in found.items() if value is not None}


def media_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `DisaggregatedParams` for a context-only request. Raises TransferFailed for unusable ones."""
    handles, hashes = params.get(HANDLES), params.get(HASHES)
    if params.get("engine") != ENGINE_KEY or not isinstance(handles, list) or not handles:
        raise TransferFailed(f"{HANDLES} is {handles!r} in the parameters of the encoder")
    if hashes is not None and (
        not isinstance(hashes, list)
        or len(hashes) != len(handles)
        or any(not isinstance(one, list) or len(one) != _HASH_NUMBERS for one in hashes)
    ):
        raise TransferFailed(f"{HASHES} does not have {_HASH_NUMBERS} numbers for each of {len(handles)} items")
    return {name: _native(params[name]) for name in _CARRIED if params.get(name) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _native(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {"base64"}:
            return base64.b64decode(value["base64"])
        return {key: _native(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_native(inner) for inner in value]
    return value


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
