"""Implements the engine protocol with vLLM's AsyncLLM.

vLLM runs its core and its workers as processes of their own; this object is the client end in the worker process.  Ids go in,
ids come out (`detokenize=False`).  A dead core cannot be restarted inside this process: `died` returns and the worker must end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headrace.workers.engine import (
    POOLING_KINDS,
    Capabilities,
    DisaggStyle,
    EngineConfig,
    EngineInfo,
    Fault,
    Load,
    Output,
    Pooled,
    PoolItem,
    Role,
    Sequence,
    Sink,
)
from headrace.workers.errors import EngineDead, EngineOverloaded, TransferFailed, UnsupportedByEngine, WorkerError
from headrace.workers.kit import ADAPTER_OPERATIONS, GUIDED, EngineSupport, words
from headrace.workers.lora import Adapters
from headrace.workers.tokens import token_table
from headrace.workers.vllm import convert
from headrace.workers.vllm.convert import CORE_GONE, OPERATIONS, CoreEngine, VllmOperations
from headrace.workers.vllm.embeddings import LentItems, hands_over_embeddings
from headrace.workers.vllm.events import KvListener
from headrace.workers.vllm.kv_transfer import VllmKvTransfer
from headrace.workers.vllm.load_meter import DeltaHandlers, EngineRequest, LoadMeter, StatsLog, StepBatcher
from headrace.workers.vllm.media import MediaReader, MediaSupport, Prompts
from headrace.workers.vllm.node_part import NodePart, follows, start_part
from headrace.workers.vllm.pooling import VllmPooling
from headrace.workers.vllm.settings import external_rank, kv_events_wanted, lora_request, ranks
from headrace.workers.vllm.start import SocketFolder, Started, start_vllm

_MOST = Capabilities(
    roles=frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE, Role.ENCODE}),
    disagg=DisaggStyle.PARAMS,
    kv_events=True,
    logprobs=True,
    prompt_logprobs=True,
    resume_repetition=True,
    guided=GUIDED,
    lora="dynamic",
    media=frozenset({"image", "video", "audio"}),
    prompt_embeds=True,
    cache_salt=True,
    priority=True,
    sleep_levels=(1, 2),
    operations=OPERATIONS | ADAPTER_OPERATIONS,
)

_CONNECTOR = "role `prefill` or `decode`, or `kv_transfer_mode`"
_ADAPTERS = "`adapters` or `enable_lora=true`"
_PROFILER = "`profiler_config`"
_SLEEP_MODE = "on a GPU `enable_sleep_mode=true`, without KV transfer and tiers"
_POOLING_MODEL = "a pooling model"
_MEDIA_MODEL = "a model for it"
_BY_SERVED_MODELS = "tests/engines/test_embeddings.py puts it beside vLLM's own server"
_BY_PAIRS = "tests/engines/test_vllm_disagg.py drives it with two engines"
_BY_MEDIA = "tests/engines/test_vllm_media.py, test_vllm_video.py and test_vllm_sound.py put it beside vLLM asked directly"

SUPPORT = EngineSupport(
    name="vllm",
    title="vLLM 0.32",
    words=words(_MOST, ("chat", "completion", "embedding", "score", "classify")),
    conditions={
        "role prefill": _CONNECTOR,
        "role decode": _CONNECTOR,
        "role encode": "a model that takes media",
        "handover params": _CONNECTOR,
        "kv_events": "prefix caching on, all ranks in this engine",
        "lora dynamic": _ADAPTERS,
        "operation load_adapter": _ADAPTERS,
        "operation unload_adapter": _ADAPTERS,
        "operation start_profile": _PROFILER,
        "operation stop_profile": _PROFILER,
        "operation sleep": _SLEEP_MODE,
        "operation wake": _SLEEP_MODE,
        "sleep level 1": _SLEEP_MODE,
        "sleep level 2": _SLEEP_MODE,
        "prompt_embeds": "`enable_prompt_embeds=true`",
        "priority": "`scheduling_policy=priority`",
        "media image": _MEDIA_MODEL,
        "media video": _MEDIA_MODEL,
        "media audio": _MEDIA_MODEL,
        "kind embedding": _POOLING_MODEL,
        "kind score": _POOLING_MODEL,
        "kind classify": _POOLING_MODEL,
    },
    untried={
        "role prefill": _BY_PAIRS,
        "role decode": _BY_PAIRS,
        "role encode": "tests/engines/test_vllm_encode.py runs one beside a worker that serves",
        "handover params": _BY_PAIRS,
        "media image": _BY_MEDIA,
        "media video": _BY_MEDIA,
        "media audio": _BY_MEDIA,
        "kind embedding": _BY_SERVED_MODELS,
        "kind score": _BY_SERVED_MODELS,
        "kind classify": _BY_SERVED_MODELS,
    },
)


class VllmEngine(CoreEngine):
    """A vLLM engine. Started once, stopped once."""

    NAME = "vLLM"

    def __init__(self) -> None:
        super().__init__()
        self._started: Started | None = None
        self._batcher: StepBatcher | None = None
        self._exchange: VllmKvTransfer | None = None
        self._meter = LoadMeter()
        self._runs: dict[str, EngineRequest] = {}
        self._priority = False
        self._traces = False
        self._sockets: SocketFolder | None = None
        self._part: NodePart | None = None
        self._pooling: VllmPooling | None = None
        self._prompts: Prompts | None = None
        self._operations: VllmOperations | None = None
        self._stats_log: StatsLog | None = None

    @property
    def capabilities(self) -> Capabilities:
        exchange = self._exchange
        operations = self._operations.able if self._operations is not None else frozenset()
        levels = self._operations.sleep_levels if self._operations is not None else ()
        if self._pooling is not None:
            return Capabilities(resume=False, seeds=False, priority=self._priority, sleep_levels=levels, operations=operations)
        lora = self._adapters is not None and self._adapters.changeable
        return replace(
            _MOST,
            roles=self._roles(),
            disagg=exchange.style if exchange is not None else DisaggStyle.NONE,
            kv_events=self._kv is not None,
            prompt_embeds=self._started is not None and self._started.info.prompt_embeds,
            media=frozenset(self._started.info.media) if self._started is not None else frozenset(),
            lora="dynamic" if lora else "none",
            priority=self._priority,
            sleep_levels=levels,
            operations=operations | ADAPTER_OPERATIONS if lora else operations,
        )

    def _roles(self) -> frozenset[Role]:
        if self._started is not None and self._started.encodes:
            return frozenset({Role.ENCODE})
        return self._exchange.roles if self._exchange is not None else frozenset({Role.AGGREGATED})

    @property
    def _adapters(self) -> Adapters | None:
        return self._started.adapters if self._started is not None else None

    @property
    def offer(self) -> MediaSupport:
        """Return the media that the engine accepts. Raises EngineDead."""
        return self._alive()[0].offer

    @property
    def llm(self) -> Any:
        """Return vLLM's own object, for the parsers. Raises EngineDead."""
        return self._alive()[0].llm

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        if follows(config):
            self._part = await start_part(config)
            return self._part.info
        self._sockets = SocketFolder()
        if kv_events_wanted(config):
            self._kv = KvListener(self._sockets.path, ranks=ranks(config), first=external_rank(config) or 0)
        try:
            with self._sockets.given(os.environ):
                kv_events = self._kv.config() if self._kv is not None else None
                lent = LentItems(self._sockets.path / "items") if hands_over_embeddings(config) else None
                items = lent.folder.path if lent is not None else None
                started = await start_vllm(config, self._meter, kv_events, items=items)
        except BaseException:
            self._deafen()
            await self._kill_processes(quiet=True)
            self._sockets.remove()
            raise
        self._processes.remember()
        self._started = started
        self._operations = VllmOperations(started.llm, cpu=started.cpu)
        self._stats_log = StatsLog(started.llm) if started.logs_stats else None
        if POOLING_KINDS & set(started.info.kinds):
            self._pooling = VllmPooling(started.llm, started.info.kinds, self._meter, self._translate)
            self._deafen()  # where it was not known before that there is nothing to route by
        reader = MediaReader(started.llm, started.offer) if started.offer.slots else None
        self._prompts = Prompts(started.llm, reader, lent, embeds=started.info.prompt_embeds)
        if self._kv is not None:
            self._kv.meet()
        self._priority = started.llm.vllm_config.scheduler_config.policy == "priority"
        self._traces = started.llm.vllm_config.observability_config.otlp_traces_endpoint is not None
        token_bytes = token_table(started.info.tokenizer_dir).token_bytes
        eos = frozenset(started.info.eos_token_ids)
        exchange = VllmKvTransfer(
            started.llm, started.transfer, block_size=started.info.block_size, stalled=self._fetch_stalled
        )

        def to_output(run: EngineRequest, result: Any) -> Output:
            sequence, first = run.sequence, not run.started
            hits = exchange.arrived(run.request_id) if first else None
            local = hits.local if hits is not None else None
            output = convert.to_output(
                sequence, result, first=first, eos=eos, token_bytes=token_bytes, local_hits=local, token_ids=run.token_ids
            )
            exchange.finish(run.request_id, output, hits)
            if first:
                output.prompt_tokens = run.prompt_tokens
                found = output.cached_tokens or 0 if hits is None else sum(hits)
                self._meter.prefilled(sequence.id, max(0, len(run.token_ids) - found))
            return output

        self._exchange = exchange
        self._meter.holds = started.transfer is not None
        self._batcher = StepBatcher(sink, DeltaHandlers(convert=to_output, on_error=self._failed, on_end=self._ended))
        return started.info

    async def submit(self, sequence: Sequence) -> None:
        started, batcher, exchange = self._alive()
        if self._pooling is not None:
            raise UnsupportedByEngine(f"this vLLM serves {', '.join(started.info.kinds)} and generates nothing")
        self._check_awake()
        prompts = self._prompts
        assert prompts is not None  # of an engine that was started  # noqa: S101
        run = EngineRequest(sequence)
        try:
            run.request_id, transfer = exchange.admit(sequence)
        except TransferFailed as error:
            batcher.take(run, error)  # it fails as a transfer in vLLM would
            return
        params = convert.to_sampling_params(sequence, transfer)
        adapter = started.adapters.of(sequence.adapter) if started.adapters is not None else None
        self._runs[sequence.id] = run
        exchange.began(run.request_id, sequence)
        self._meter.queued(sequence.id, convert.to_compute(sequence))
        try:
            prompt = await prompts.prompt(run)
            if sequence.id not in self._runs:  # aborted meanwhile
                prompts.forget(run)
                return
            collector = await started.llm.add_request(
                run.request_id,
                prompt,
                params,
                lora_request=lora_request(adapter) if adapter is not None else None,
                trace_headers=sequence.trace if self._traces else None,
                priority=sequence.priority if self._priority else 0,
                data_parallel_rank=sequence.rank,
                session_id=sequence.session_id,
                reasoning_ended=sequence.reasoning_ended,
                reasoning_parser_kwargs=sequence.reasoning_kwargs,
            )
        except BaseException as error:
            run.closed = True
            self._ended(sequence.id)
            prompts.forget(run)
            raise self._translate(error) from error
        if run.closed:  # aborted while it was being handed over
            await started.llm.abort(run.request_id)
            return
        batcher.attach(collector, run)

    def _check_awake(self) -> None:
        """Raise EngineOverloaded while vLLM sleeps: it would queue what it is given."""
        if self._operations is not None and self._operations.asleep:
            raise EngineOverloaded(f"the engine sleeps (level {self._operations.asleep})")

    async def encode(self, item: Mapping[str, Any]) -> bytes:
        """Compute the embeddings of a media item. Raises RequestInvalid, UnsupportedByEngine, EngineDead, EngineError."""
        started = self._alive()[0]
        if not started.encodes or self._prompts is None:
            raise UnsupportedByEngine("this vLLM is no encode worker: it was not started with the role 'encode'")
        try:
            return await self._prompts.encode(item)
        except Exception as error:
            raise self._translate(error) from error

    async def abort(self, ids: Seq[str]) -> None:
        known = frozenset(ids) & self._runs.keys()
        if not known or self._started is None or self._batcher is None:
            return
        runs = [self._runs.pop(sequence_id) for sequence_id in known]
        for run in runs:
            run.closed = True
            self._gone(run.sequence.id)
        self._batcher.drop(known)
        await self._abort(runs)

    async def _abort(self, runs: Seq[EngineRequest]) -> None:
        if self._started is None or self._exchange is None:
            return
        for run in runs:
            self._exchange.aborted(run.request_id, run.sequence)
        with suppress(Exception):  # a dying engine aborts everything by itself
            await self._started.llm.abort([run.request_id for run in runs])

    async def _fetch_stalled(self, sequence_id: str, reason: str) -> None:
        run = self._runs.pop(sequence_id, None)
        if run is not None and self._batcher is not None:
            self._gone(sequence_id)
            self._batcher.take(run, TransferFailed(reason))
            await self._abort([run])

    def load(self) -> Load:
        if self._started is None:
            return Load()
        pooling = self._pooling.running if self._pooling is not None else 0
        info = self._started.info
        return self._meter.read(mine=len(self._runs) + pooling, blocks=info.blocks, ranks=info.ranks)

    async def died(self) -> str:
        return await (self._part.watch() if self._part is not None else super().died())

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        self._alive()[2].release(sequence_id, params)

    async def pool(self, item: PoolItem) -> Pooled:
        self._alive()
        if self._pooling is None:
            raise UnsupportedByEngine("this vLLM generates; it makes vectors of this model with runner=pooling")
        self._check_awake()
        return await self._pooling.pool(item)

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        self._alive()
        assert self._operations is not None  # of an engine that was started  # noqa: S101
        if self._adapters is not None and op in ADAPTER_OPERATIONS:
            return await self._adapters.do(op, args)
        try:
            return await self._operations.do(op, args)
        except WorkerError:
            raise
        except Exception as error:
            raise self._translate(error) from error

    async def stop(self, grace_s: float) -> None:
        started, self._started = self._started, None
        if self._part is not None:
            await self._part.stop()
        if self._stats_log is not None:
            self._stats_log.close()
        if self._exchange is not None:
            await self._exchange.close()
        if self._prompts is not None:
            self._prompts.close()
        if started is not None:
            for run in self._runs.values():
                run.closed = True
            self._runs.clear()
            self._processes.remember()
            if started.llm.output_handler is not None:
                started.llm.output_handler.cancel()  # or it reports the end of the core as a failure
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 1):
                    await asyncio.to_thread(started.llm.shutdown, grace_s)
            started.llm.shutdown = lambda *_, **__: None  # its destructor calls it again, perhaps in half an interpreter
        self._deafen()
        await self._kill_processes()
        if self._sockets is not None:
            self._sockets.remove()

    def look(self) -> None:
        if self._started is not None and self._started.llm.errored:
            self.declare_dead(CORE_GONE)

    def _alive(self) -> tuple[Started, StepBatcher, VllmKvTransfer]:
        self.check_alive()
        if self._started is None or self._batcher is None or self._exchange is None:
            raise EngineDead("the engine is not running")
        return self._started, self._batcher, self._exchange

    def dropped(self) -> int:
        for run in self._runs.values():
            run.closed = True
        dropped = len(self._runs)
        self._runs.clear()
        return dropped

    def _ended(self, sequence_id: str) -> None:
        run = self._runs.pop(sequence_id, None)
        if run is not None and self._exchange is not None:
            self._exchange.arrived(run.request_id)
        self._gone(sequence_id)

    def _gone(self, sequence_id: str) -> None:
        self._meter.gone(sequence_id)
        if self._prompts is not None:
            self._prompts.ended(sequence_id)

    def _failed(self, run: EngineRequest, error: Exception) -> Output | None:
        """Return the output for a sequence that vLLM ended with an exception, or None if the whole engine is dead."""
        translated = self._translate(error)
        if isinstance(translated, EngineDead):
            return None
        code = "transfer_failed" if isinstance(translated, TransferFailed) else "engine_error"
        return Output(run.sequence.id, [], fault=Fault(code, str(translated), retriable=True))
