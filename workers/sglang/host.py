"""Serves one worker from inside the child process: runs its sequences and inputs in SGLang and reports their outputs.

Each request has a task that waits for its chunks. The chunks of an engine step arrive together: the first one schedules a
flush, which finds the others and sends all outputs in one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import structlog

from headrace.workers.engine import EngineInfo, Fault, Load, Output, PoolItem
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.errors import EngineError, EngineOverloaded, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.kit import ADAPTER_OPERATIONS, summed
from headrace.workers.lora import Adapter, Adapters
from headrace.workers.sglang import convert
from headrace.workers.sglang.convert import StopTokens
from headrace.workers.sglang.describe import honours_seeds
from headrace.workers.sglang.disagg_rendezvous import as_transfer_failed, bootstrap_fields, role_of
from headrace.workers.sglang.messages import (
    Abort,
    Control,
    Error,
    ErrorKind,
    Frames,
    LoadReport,
    PoolInput,
    Reply,
    StepOutputs,
    Stop,
    Submit,
    ToChild,
)
from headrace.workers.tokens import token_table


class LoadMeter:
    """Turns snapshots of all data-parallel ranks into one `Load`."""

    def __init__(self, *, page_size: int, blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._page_size = page_size
        self._blocks = blocks
        self._clock = clock
        self._last: float | None = None
        self._prefilled = 0
        self._step = Load()

    def stepped(self, snapshots: Iterable[Any], *, decodes: int, mine: int) -> Load:
        """Return the load after a step that brought tokens for `decodes` sequences. `mine` sequences are in the engine.

        The time between two steps of a busy engine is the duration of a step.
        """
        now = self._clock()
        step_s = now - self._last if self._last is not None else 0.0
        self._last = now if mine else None
        known = list(snapshots)
        prefilled = sum(snapshot.total_prefill_uncached_tokens for snapshot in known)
        self._step = Load(step_s=step_s, step_decodes=decodes, step_prefill_tokens=max(0, prefilled - self._prefilled))
        self._prefilled = prefilled
        return self.read(known, mine=mine)

    def read(self, snapshots: Iterable[Any], *, mine: int) -> Load:
        """Return the load now. The snapshots of an engine without sequences are stale: it has no step to write them in."""
        if mine == 0:
            self._last = None
            return Load(blocks_total=self._blocks)
        known = list(snapshots)
        blocks = self._blocks // max(1, len(known))
        ranks = [
            Load(
                running=snapshot.num_running_reqs,
                waiting=snapshot.num_waiting_reqs,
                blocks_used=min(blocks, -(-snapshot.num_used_tokens // self._page_size)),
                blocks_total=blocks,
                queued_prefill_tokens=snapshot.num_waiting_uncached_tokens,
                step_s=self._step.step_s,
                step_prefill_tokens=self._step.step_prefill_tokens // len(known),  # known of all together
                step_decodes=self._step.step_decodes // len(known),
            )
            for snapshot in known
        ]
        queued = sum(rank.queued_prefill_tokens for rank in ranks)
        load = summed(ranks, mine=mine, blocks=self._blocks, queued=queued)
        return msgspec.structs.replace(
            load, step_prefill_tokens=self._step.step_prefill_tokens, step_decodes=self._step.step_decodes
        )


log = structlog.get_logger()

LOAD_EVERY_S = 0.5  # load reports of an engine between whose steps much time passes, or that has none
FLUSH_WAIT_S = 2.0  # for what has just ended to be out of the scheduler, which clears no cache that is in use
ACCEPT_TURNS = 20  # turns of the event loop in which SGLang has checked a request; a later refusal is a fault of the sequence
_KINDS: tuple[tuple[type[WorkerError], ErrorKind], ...] = (
    (RequestInvalid, "invalid"),
    (UnsupportedByEngine, "unsupported"),
    (EngineOverloaded, "overloaded"),
)


class EngineHost:
    """The child's side of the engine."""

    def __init__(self, engine: Any, info: EngineInfo, frames: Frames[ToChild]) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._info = info
        self._frames = frames
        self._eos = frozenset(info.eos_token_ids)
        self._token_bytes = token_table(info.tokenizer_dir).token_bytes
        self._seeds = honours_seeds(engine)
        self._role = role_of(engine.server_args.disaggregation_mode)
        self._adapters = Adapters(
            "SGLang",
            {name: Adapter(name, "") for name in info.adapters},
            room=None if engine.server_args.enable_lora else "enable_lora",
            add=self._add_adapter,
            remove=self._remove_adapter,
        )
        self._meter = LoadMeter(page_size=info.block_size, blocks=info.blocks)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._dropped: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._batch: list[Output] = []
        self._paused = False

    async def serve(self) -> None:
        """Serve until the worker says `Stop` or is gone."""
        reporting = asyncio.create_task(self._report_load())
        try:
            while (message := await self._frames.receive()) is not None and not isinstance(message, Stop):
                self._take(message)
        finally:
            reporting.cancel()
            self._engine.shutdown()

    def _take(self, message: Any) -> None:
        match message:
            case Submit():
                self._spawn(self._submit(message))
            case Abort():
                self._abort(message.ids)
            case PoolInput():
                self._spawn(self._answer(message.call, self._pool(message.item), name=message.item.id))
            case Control():
                self._spawn(self._answer(message.call, self._control(message.operation, message.args)))
            case _:
                raise AssertionError(message)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _submit(self, message: Submit) -> None:
        """Run a sequence, and accept it once SGLang has validated it."""
        sequence = message.sequence
        try:
            request = self._request(sequence)
        except WorkerError as error:
            self._reply(message.call, error=error)
            return
        running = self._spawn(self._run(sequence, request))
        self._running[sequence.id] = running
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
            if running.done():
                break
        refusal = running.exception() if running.done() and not running.cancelled() else None
        self._reply(message.call, error=refusal)
        if refusal is not None:
            return
        if not running.done():
            running.add_done_callback(lambda task: self._fail_late(sequence, task))

    def _request(self, sequence: EngineSequence) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        if not self._manager.model_config.is_generation:
            raise UnsupportedByEngine(f"this SGLang serves {', '.join(self._info.kinds)} and generates nothing")
        self._adapters.of(sequence.adapter)  # SGLang serves some after their unloading
        bootstrap = bootstrap_fields(sequence.handover, role=self._role, address=self._info.address)
        return GenerateReqInput(**convert.to_request(sequence, seeds=self._seeds, bootstrap=bootstrap))

    async def _run(self, sequence: EngineSequence, request: Any) -> None:
        first, ended = True, False
        stop_tokens = StopTokens(sequence.sampling)
        try:
            async with contextlib.aclosing(self._manager.generate_request(request, None)) as chunks:
                async for chunk in chunks:
                    if ended or sequence.id in self._dropped:
                        continue
                    output = convert.to_output(sequence, chunk, first=first, eos=self._eos, token_bytes=self._token_bytes)
                    output = as_transfer_failed(sequence, output, first=first)
                    first = False
                    ended = output.fault is None and stop_tokens.end(output)
                    self._put(output)
                    if ended and chunk["meta_info"].get("finish_reason") is None:
                        self._manager.abort_request(rid=convert.request_id(sequence.id))
                    elif output.finish is not None or output.fault is not None:
                        break
        except ValueError as error:  # SGLang's word for a request that it refuses
            raise RequestInvalid(str(error)) from error
        finally:
            self._running.pop(sequence.id, None)
            self._dropped.discard(sequence.id)

    def _fail_late(self, sequence: EngineSequence, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        retriable = not isinstance(error, RequestInvalid)
        if retriable:
            log.error("engine.sequence_failed", sequence=sequence.id, error=repr(error))
        code = "engine_error" if retriable else "invalid_request"
        self._put(Output(sequence.id, [], fault=Fault(code, str(error), retriable=retriable)))

    def _put(self, output: Output) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(output)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        batch = [output for output in batch if output.id not in self._dropped]
        if batch:
            load = self._meter.stepped(self._snapshots(), decodes=len(batch), mine=len(self._running))
            self._frames.send(StepOutputs(batch, load))

    def _abort(self, ids: list[str]) -> None:
        for name in ids:
            if name in self._running:
                self._dropped.add(name)
                self._manager.abort_request(rid=convert.request_id(name))
        self._batch[:] = [output for output in self._batch if output.id not in ids]

    async def _pool(self, item: PoolItem) -> Any:
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        if self._manager.model_config.is_generation:
            raise UnsupportedByEngine("this SGLang generates; it makes vectors of this model with is_embedding=true")
        if item.task != "embed":
            raise UnsupportedByEngine(f"SGLang serves embeddings here, not {item.task}")
        if item.normalize is False:
            raise UnsupportedByEngine("SGLang normalizes all vectors", param="normalize")
        if item.extra:
            raise RequestInvalid(f"SGLang knows no setting {min(item.extra)!r} for vectors", param=min(item.extra))
        request = EmbeddingReqInput(rid=item.id, input_ids=item.token_ids, lora_path=item.adapter)
        if item.dimensions is not None:
            request.dimensions = item.dimensions
        async with contextlib.aclosing(self._manager.generate_request(request, None)) as answers:
            async for answer in answers:
                vector = np.asarray(answer["embedding"], dtype="<f4")
                return [vector.tobytes(), int(answer["meta_info"].get("cached_tokens") or 0)]
        raise EngineError("SGLang ended an input without a vector")

    async def _control(self, operation: str, args: Mapping[str, Any]) -> Any:
        if operation in ADAPTER_OPERATIONS:
            return await self._adapters.do(operation, args)
        match operation:
            case "reset_prefix_cache":
                return bool((await self._manager.flush_cache(timeout_s=FLUSH_WAIT_S)).success)
            case "pause" | "resume" if self._manager.model_config.is_generation:
                await self._pause(operation == "pause", args)
                return {}
            case "is_paused" if self._manager.model_config.is_generation:
                return {"result": self._paused}
            case _:
                raise UnsupportedByEngine(
                    f"SGLang has no operation {operation!r} here; known: load_adapter, unload_adapter, reset_prefix_cache, "
                    "and of a model that generates pause, resume, is_paused"
                )

    async def _pause(self, paused: bool, args: Mapping[str, Any]) -> None:
        """Have the scheduler stand still with its sequences inside, or go on. New sequences wait in front of it meanwhile."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        if (mode := args.get("mode", "keep")) != "keep":
            raise RequestInvalid(f"SGLang pauses with its sequences inside here (mode keep), not with mode {mode!r}")
        if paused:
            await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        else:
            await self._manager.continue_generation(ContinueGenerationReqInput())
        self._paused = paused

    async def _add_adapter(self, adapter: Adapter) -> None:
        _check(await self._engine.async_load_lora_adapter(adapter.name, adapter.folder))

    async def _remove_adapter(self, adapter: Adapter) -> None:
        _check(await self._engine.async_unload_lora_adapter(adapter.name))

    async def _answer(self, call: int, work: Any, *, name: str | None = None) -> None:
        task = asyncio.ensure_future(work)
        if name is not None:
            self._running[name] = task
        try:
            self._reply(call, value=await task)
        except Exception as error:
            self._reply(call, error=error)
        finally:
            if name is not None:
                self._running.pop(name, None)

    def _reply(self, call: int, *, value: Any = None, error: BaseException | None = None) -> None:
        if error is None:
            self._frames.send(Reply(call, value))
            return
        kind: ErrorKind = next((kind for made, kind in _KINDS if isinstance(error, made)), "failed")
        if isinstance(error, ValueError):  # SGLang's word for a request that it refuses
            kind = "invalid"
        self._frames.send(Reply(call, error=Error(kind, str(error) or repr(error), getattr(error, "param", None))))

    async def _report_load(self) -> None:
        while True:
            self._frames.send(LoadReport(self._meter.read(self._snapshots(), mine=len(self._running))))
            await asyncio.sleep(LOAD_EVERY_S)

    def _snapshots(self) -> list[Any]:
        return list(self._manager.load_snapshot_reader.read_all())


def _check(result: Any) -> None:
    """Raise EngineError for a change that SGLang refused."""
    if not result.success:
        raise EngineError(f"SGLang refused the change of adapters: {result.error_message}")
