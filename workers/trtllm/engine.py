"""Runs TensorRT-LLM's `LLM` behind the engine protocol.

TensorRT-LLM runs a process per GPU; its `LLM` object talks to them from this one. It was not installed where this was written:
the adapter is built on the documented API, and tested against a stand-in of it (docs/engines.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import (
    Capabilities,
    DisaggStyle,
    EngineConfig,
    EngineInfo,
    Fault,
    KvBatch,
    Load,
    Output,
    Role,
    Sequence,
    Sink,
)
from headrace.workers.errors import EngineDead, EngineOverloaded, RequestInvalid, TransferFailed, UnsupportedByEngine
from headrace.workers.kit import ADAPTER_OPERATIONS, GUIDED, EngineSupport, ProcessEngine, words
from headrace.workers.trtllm import convert
from headrace.workers.trtllm import convert as handover
from headrace.workers.trtllm.convert import HeldPrefills
from headrace.workers.trtllm.settings import lora_request
from headrace.workers.trtllm.start import Started, keep_polling, start_trtllm
from headrace.workers.trtllm.streams import Handlers, ResultStreams, StreamedRequest

_log = structlog.get_logger()

WAITING = 1024  # sequences beyond the slots that are taken in
_GONE = "TensorRT-LLM has shut down; its own log lines say why"


_MOST = Capabilities(
    resume_repetition=True,
    roles=frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE}),
    disagg=DisaggStyle.PARAMS,
    kv_events=True,
    logprobs=True,
    guided=GUIDED,
    lora="dynamic",
    cache_salt=True,
    priority=True,
    operations=ADAPTER_OPERATIONS,
)

_TRANSCEIVER = "`cache_transceiver_config`, or role `prefill` or `decode`"
_ADAPTERS = "`adapters` or `lora_config`"

SUPPORT = EngineSupport(
    name="trtllm",
    title="TensorRT-LLM 1.2 and 1.3 (stand-in)",
    words=words(_MOST, ("chat", "completion")),
    conditions={
        "role prefill": "role `prefill`, or `cache_transceiver_config` and `disable_overlap_scheduler=true`",
        "role decode": _TRANSCEIVER,
        "handover params": _TRANSCEIVER,
        "kv_events": "block reuse on; in 1.2 without the salts of blocks",
        "lora dynamic": _ADAPTERS,
        "operation load_adapter": _ADAPTERS,
        "operation unload_adapter": _ADAPTERS,
        "priority": "TensorRT-LLM 1.3",
    },
)


class TrtllmEngine(ProcessEngine):
    """A TensorRT-LLM engine. Started once, stopped once."""

    NAME = "TensorRT-LLM"
    LOOK_EVERY_S = 0.2

    def __init__(self) -> None:
        super().__init__()
        self._started: Started | None = None
        self._streams: ResultStreams | None = None
        self._held = HeldPrefills()
        self._requests: dict[str, StreamedRequest] = {}
        self._pollers: list[asyncio.Task[None]] = []

    @property
    def capabilities(self) -> Capabilities:
        started = self._started
        hands_over = started is not None and bool(started.info.handover)
        lora = started is not None and started.adapters.changeable
        return replace(
            _MOST,
            roles=started.roles if started is not None else frozenset({Role.AGGREGATED}),
            disagg=DisaggStyle.PARAMS if hands_over else DisaggStyle.NONE,
            kv_events=self._kv is not None,
            lora="dynamic" if lora else "none",
            priority=started is not None and started.installed.priority,
            operations=ADAPTER_OPERATIONS if lora else frozenset(),
        )

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        try:
            started = await start_trtllm(config)
        except BaseException:
            await self._kill_processes(quiet=True)
            raise
        self._processes.remember()
        self._started = started
        handlers = Handlers(on_error=self._failed, on_first=self._first, on_end=self._ended)
        self._streams = ResultStreams(sink, started.model, handlers)

        def busy() -> bool:
            return bool(self._requests)

        stats = keep_polling(started.llm.get_stats_async, started.meter.note, busy, what="statistics")
        self._pollers.append(asyncio.create_task(stats, name="trtllm-statistics"))
        if started.feeds is not None:
            self._kv = started.feeds
            events = keep_polling(started.llm.get_kv_cache_events_async, started.feeds.put, busy, what="kv events")
            self._pollers.append(asyncio.create_task(events, name="trtllm-kv-events"))
        return started.info

    # -- sequences -------------------------------------------------------------------------------------------

    async def submit(self, sequence: Sequence) -> None:
        started, streams = self._alive()
        self._check(started, sequence)
        progress = convert.ReadProgress(sequence)
        options: dict[str, Any] = {}
        if sequence.handover is not None:
            try:
                if self._hand_over(started, sequence, progress, options):
                    return
            except TransferFailed as error:
                streams.give(Output(sequence.id, [], fault=Fault("transfer_failed", str(error), retriable=True)))
                return
        params = convert.to_sampling_params(sequence, started.model)
        options |= self._options(started, sequence)
        try:
            result = started.llm.generate_async(sequence.token_ids, params, streaming=True, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise RequestInvalid(str(error)) from error
        except Exception:
            self.check_alive()
            raise
        request = StreamedRequest(progress, result)
        self._requests[sequence.id] = request
        started.meter.queued(sequence.id, len(sequence.token_ids) - sequence.expected_cached, rank=sequence.rank)
        streams.follow(request)

    def _check(self, started: Started, sequence: Sequence) -> None:
        if sequence.id in self._requests:
            raise RequestInvalid(f"a sequence with id {sequence.id!r} is running", param="id")
        if sequence.media or sequence.prompt_embeds is not None:
            given = "media" if sequence.media else "prompt_embeds"
            raise UnsupportedByEngine(f"this engine takes token ids only, no {given}", param="messages")
        if sequence.prompt_logprobs is not None:
            raise UnsupportedByEngine(
                "prompt_logprobs: TensorRT-LLM does not tell the log probability of a prompt's own tokens",
                param="prompt_logprobs",
            )
        if len(sequence.token_ids) >= started.info.context_length:
            raise RequestInvalid(
                f"{len(sequence.token_ids)} tokens leave no room for an answer in {started.info.context_length}",
                param="token_ids",
            )
        if len(self._requests) >= started.info.slots + WAITING:
            raise EngineOverloaded(f"{len(self._requests)} sequences are in the engine already")

    def _options(self, started: Started, sequence: Sequence) -> dict[str, Any]:
        options: dict[str, Any] = {
            "lora_request": lora_request(started.model.api, started.adapters.of(sequence.adapter)),
            "cache_salt": sequence.cache_salt,
        }
        if (wishes := convert.scheduling_of(sequence, started.model)) is not None:
            from tensorrt_llm.scheduling_params import SchedulingParams

            options["scheduling_params"] = SchedulingParams(**wishes)
        if started.installed.priority:
            options["priority"] = convert.to_priority(sequence.priority)
        return {name: value for name, value in options.items() if value is not None}

    def _hand_over(self, started: Started, sequence: Sequence, progress: convert.ReadProgress, options: dict[str, Any]) -> bool:
        """Add a hand-over to a request's options. Returns true if the sequence has ended with the context side's token.

        Raises TransferFailed, UnsupportedByEngine.
        """
        given = sequence.handover
        if given is None or not started.info.handover:
            side = f": it cannot be the {given.kind} side" if given is not None else ""
            raise UnsupportedByEngine(f"this TensorRT-LLM was started without cache_transceiver_config{side}")
        api = started.model.api
        if given.kind == "prefill":
            options["disaggregated_params"] = handover.context_params(api)
            return False
        first = handover.first_tokens(given.params)
        if (why := handover.needs_own_first_token(sequence, given.params)) is not None:
            _log.info("engine.handover_unused", sequence=sequence.id, because_of=why)
            return False
        if (ended := self._ended_at_once(started, sequence, first)) is not None:
            self._alive()[1].give(ended)
            return True
        options["disaggregated_params"] = handover.generation_params(api, given.params)
        progress.first = first
        progress.first_logprobs = handover.first_logprobs(given.params, started.model.token_bytes)
        return False

    def _ended_at_once(self, started: Started, sequence: Sequence, first: list[int]) -> Output | None:
        """Return the only output of a sequence that ends with the token that the context side has sampled."""
        sampling, token, given = sequence.sampling, first[0], sequence.handover
        logprobs = None
        if sequence.logprobs is not None and given is not None:
            logprobs = handover.first_logprobs(given.params, started.model.token_bytes)
        stops = token in sampling.stop_token_ids
        output = Output(sequence.id, [token], cached_tokens=0, logprobs=logprobs)
        if stops or (token in started.model.eos and not sampling.ignore_eos):
            output.finish, output.stop = "stop", token if stops else None
        elif sampling.max_tokens == 1:
            output.finish = "length"
        return output if output.finish is not None else None

    async def abort(self, ids: Seq[str]) -> None:
        found = [request for name in ids if (request := self._requests.pop(name, None)) is not None]
        if not found or self._started is None or self._streams is None:
            return
        self._streams.drop(found)
        for request in found:
            self._started.meter.gone(request.id)
            with suppress(Exception):  # a dying engine aborts everything by itself
                request.result.abort()

    # -- what comes of them ----------------------------------------------------------------------------------

    def _first(self, request: StreamedRequest) -> None:
        if self._started is not None:
            self._started.meter.gone(request.id)

    def _ended(self, request: StreamedRequest, output: Output | None) -> None:
        self._requests.pop(request.id, None)
        if self._started is None:
            return
        self._started.meter.gone(request.id)
        if output is not None and output.handover is not None:
            self._held.keep(request.id, request.result, self._started.info.lease_s)

    def _failed(self, request: StreamedRequest, error: Exception) -> Output | None:
        """Return the output for a request that ended with an exception, None if the whole engine is dead."""
        started = self._started
        if started is None:
            return None
        if not isinstance(error, started.model.api.RequestError):
            self.look()
            if self._death is not None:
                return None
            _log.error("engine.output_unreadable", sequence=request.id, error=repr(error))
        fetching = bool(request.progress.first) and not request.progress.started
        code = "transfer_failed" if fetching else "engine_error"
        return Output(request.id, [], fault=Fault(code, str(error) or repr(error), retriable=True))

    # -- life ------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        if self._started is None:
            return Load()
        info = self._started.info
        return self._started.meter.read(mine=len(self._requests), blocks=info.blocks, slots=info.slots)

    def look(self) -> None:
        """Notice that the engine has shut down: it does so by itself when one of its processes fails."""
        if self._death is None and self._started is not None:
            executor = getattr(self._started.llm, "_executor", None)
            if executor is None or executor.is_shutdown():
                self.declare_dead(_GONE)

    def dropped(self) -> int:
        requests = list(self._requests.values())
        self._requests.clear()
        for request in requests:
            request.closed = True
        return len(requests)

    def _alive(self) -> tuple[Started, ResultStreams]:
        self.check_alive()
        if self._started is None or self._streams is None:
            raise EngineDead("the engine is not running")
        return self._started, self._streams

    async def stop(self, grace_s: float) -> None:
        started, self._started = self._started, None
        for task in self._pollers:
            task.cancel()
        if self._pollers:
            await asyncio.wait(self._pollers)
            self._pollers.clear()
        if self._streams is not None:
            await self._streams.close()
        self._requests.clear()
        self._held.clear()
        if started is not None:
            self._processes.remember()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 1):
                    await run_in_thread(started.llm.shutdown, name="trtllm-stop")
        await self._kill_processes()

    # -- the cache, hand-overs and operations ----------------------------------------------------------------

    async def replay_kv(self, start: int, rank: int = 0) -> list[KvBatch]:
        kept: list[KvBatch] = self._events_of(rank).replay(start)
        return kept

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        """Free what the context side offers. The generation side cannot tell it: there it runs out by its time limit."""
        self._alive()
        if params is None:
            self._held.release(sequence_id)

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        adapters = self._alive()[0].adapters
        return await (adapters.do(op, args) if op in ADAPTER_OPERATIONS else super().control(op, args))
