"""Runs pooling jobs: every input without a result goes to the engine, and its vector, picture or video ends its choice.

All inputs of a job are given to the engine at once; the engine chooses their order. A resumed job runs only the inputs without
an end; the others are not computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from headrace.broker.codec import decode, log_ids, unpack_u32
from headrace.broker.errors import BrokerError, WireError
from headrace.broker.messages.frames import Finish, JobFault
from headrace.broker.messages.requests import Pooling
from headrace.broker.protocol.run import Run
from headrace.broker.spill import ResultObjects
from headrace.broker.worker.runs import WorkerRuns
from headrace.jetstream.tasks import TaskScope
from headrace.workers import metrics
from headrace.workers.engine import Engine, EngineInfo, PoolItem
from headrace.workers.errors import EngineDead, RequestInvalid, WorkerError
from headrace.workers.runtime.watchdog import Watchdog

log = structlog.get_logger()

_NEEDED = {"embed": ("embedding",), "classify": ("classify", "score"), "image": ("image",), "video": ("video",)}


class PoolRuns:
    """The runs of kind `pool`. Each input has a task."""

    def __init__(
        self,
        engine: Engine,
        watchdog: Watchdog,
        scope: TaskScope,
        *,
        refused: Callable[[Run, WorkerError], None],
    ) -> None:
        """`refused` is called if the engine refuses an input. `scope` is open while the runtime runs."""
        self._engine = engine
        self._refused = refused
        self._watchdog = watchdog
        self._scope = scope
        self.results: ResultObjects | None = None  # None: a result has to fit into a frame
        self._tasks: dict[Run, set[asyncio.Task[None]]] = {}
        self._flushing = False

    def __len__(self) -> int:
        return sum(map(len, self._tasks.values()))

    def start(self, run: Run, payload: bytes, *, sink: WorkerRuns, info: EngineInfo) -> None:
        """Begin a job, or what is left of it. What is wrong with it is told to the sink."""
        try:
            items = _items(run, decode(Pooling, payload), info)
        except WireError as error:
            sink.fail(run, JobFault("invalid_request", f"malformed payload: {error}"))
            return
        except RequestInvalid as error:
            sink.fail(run, JobFault("invalid_request", str(error), param=error.param))
            return
        if len(items) < len(run.choices):
            metrics.RESUMED.inc()
        if not self._tasks:
            self._watchdog.stepped()
        mine: set[asyncio.Task[None]] = set()
        if items:
            self._tasks[run] = mine
        left = _Left(len(items), sum(len(item.token_ids) for item in items.values()))
        for choice, item in items.items():
            task = self._scope.spawn(self._pool(run, choice, item, sink, left), name=item.id)
            mine.add(task)
            task.add_done_callback(partial(self._forget, run))

    def stop(self, run: Run) -> None:
        if run in self._tasks:
            for task in self._tasks.pop(run) - {asyncio.current_task()}:
                task.cancel()

    def _forget(self, run: Run, task: asyncio.Task[None]) -> None:
        mine = self._tasks.get(run)
        if mine is not None:
            mine.discard(task)
            if not mine:
                del self._tasks[run]

    async def _pool(self, run: Run, choice: int, item: PoolItem, sink: WorkerRuns, left: _Left) -> None:
        spill = None
        try:
            pooled = await self._engine.pool(item)
            if len(pooled.vector) > sink.max_frame_bytes // 2 and self.results is not None:
                spill = await self.results.put(item.id, pooled.vector)
        except EngineDead as error:
            self._watchdog.declare_dead(str(error))  # the session moves what was running
            return
        except WorkerError as error:
            if run in self._tasks:  # The first input to fail decides for the run.
                self.stop(run)
                self._refused(run, error)
            return
        except BrokerError as error:
            if run in self._tasks:
                self.stop(run)
                sink.retry_elsewhere(run, JobFault("engine_error", str(error), retriable=True))
            return
        except Exception as error:
            log.error("pooling.crashed", **log_ids(run.envelope), sequence=item.id, exc_info=error)
            if run in self._tasks:
                self.stop(run)
                sink.retry_elsewhere(run, JobFault("engine_error", f"{type(error).__name__}: {error}", retriable=True))
            return
        self._watchdog.stepped()
        tokens = len(item.token_ids)
        metrics.PROMPT_TOKENS.inc(tokens)
        metrics.POOLED.labels(item.task).inc()
        left.inputs -= 1
        left.cached += pooled.cached_tokens
        if not left.inputs:
            sink.prefilled(run, left.tokens - left.cached)
        fin = Finish(
            reason="stop",
            prompt_tokens=tokens,
            cached_tokens=pooled.cached_tokens,
            vector=pooled.vector if spill is None else b"",
            spill=spill,
        )
        sink.append(run, choice, [], [], fin=fin)
        if not self._flushing:  # Other inputs that end in this turn of the event loop go into the same frame.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush, sink)

    def _flush(self, sink: WorkerRuns) -> None:
        self._flushing = False
        sink.flush()


class _Left:
    __slots__ = ("cached", "inputs", "tokens")

    def __init__(self, inputs: int, tokens: int) -> None:
        self.inputs = inputs
        self.tokens = tokens
        self.cached = 0


def _items(run: Run, pooling: Pooling, info: EngineInfo) -> dict[int, PoolItem]:
    """Return the inputs without an end, by choice. Raises RequestInvalid, MalformedMessage."""
    if not set(_NEEDED[pooling.task]) & set(info.kinds):
        raise RequestInvalid(f"this worker serves {', '.join(info.kinds)}, not {pooling.task}", param="model")
    if len(pooling.inputs) != len(run.choices):
        raise RequestInvalid(f"{len(pooling.inputs)} inputs for {len(run.choices)} choices", param="input")
    picture = pooling.picture
    if pooling.task in ("image", "video") and picture is None:
        raise RequestInvalid(f"a task {pooling.task!r} needs a prompt", param="prompt")
    items = {}
    for index, given in enumerate(pooling.inputs):
        if run.choices[index].settled:
            continue
        ids = unpack_u32(given.token_ids)
        if not 0 < len(ids) <= info.context_length:
            raise RequestInvalid(f"input {index} has {len(ids)} tokens; 1 to {info.context_length} are possible", param="input")
        items[index] = PoolItem(
            id=f"{run.id}-{run.attempt}-{run.run & 0xFFFF:04x}-{index}",
            task=pooling.task,
            token_ids=ids,
            second=given.second,
            dimensions=pooling.dimensions,
            normalize=pooling.normalize,
            priority=run.engine_priority,
            adapter=pooling.adapter,
            extra=pooling.extra,
            picture=None if picture is None else msgspec.structs.replace(picture, seed=picture.seed + index),
        )
    return items
