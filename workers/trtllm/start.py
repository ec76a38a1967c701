"""Starts TensorRT-LLM: checks, settings, the blocking construction, a first request, and the description of the engine.

The number of KV blocks is known only when the engine runs, from its first KV event or its statistics; both come after a first
request, so one of one token is made here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import EngineConfig, EngineInfo, Role
from headrace.workers.errors import EngineStartFailed, WorkerError
from headrace.workers.lora_adapters import adapters_of
from headrace.workers.text.tokens import token_table
from headrace.workers.trtllm.adapters import Adapters, read_adapter
from headrace.workers.trtllm.convert import Model
from headrace.workers.trtllm.installed_check import Installed, load_installed
from headrace.workers.trtllm.kv_feed import KvFeeds
from headrace.workers.trtllm.launch import attention_ranks, check_launch, shared_by
from headrace.workers.trtllm.load_meter import LoadMeter
from headrace.workers.trtllm.logits import LogitsProcessors
from headrace.workers.trtllm.model_files import ModelFacts, local_folder, read_model
from headrace.workers.trtllm.polling import poll_once
from headrace.workers.trtllm.settings import engine_args, handover_word, lease_s, prepare_environment, roles_of

FALLBACK_LENGTH = 4096  # of a model whose configuration says nothing
_TOLD_WITHIN_S = 10.0  # until the engine has told its number of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running engine, its description, and what the adapter needs to talk to it."""

    llm: Any
    info: EngineInfo
    installed: Installed
    model: Model
    adapters: Adapters
    roles: frozenset[Role]
    meter: LoadMeter
    feeds: KvFeeds | None  # with the KV events of the first request; None: it tells none


@dataclass(frozen=True, slots=True)
class _Built:
    llm: Any
    args: Mapping[str, Any]
    files: ModelFacts


async def start_trtllm(config: EngineConfig) -> Started:
    """Import TensorRT-LLM, load the model and serve a first request. Raises EngineStartFailed."""
    prepare_environment()
    known_adapters = adapters_of(config, read_adapter)
    processors = LogitsProcessors.of(config)
    installed = await run_in_thread(load_installed, name="trtllm-import")
    built = await run_in_thread(lambda: _build(config, installed), name="trtllm-start")
    try:
        lora = built.args.get("lora_config")
        adapters = Adapters(installed.api, known_adapters, most_rank=lora.max_lora_rank if lora is not None else None)
        cache = built.args["kv_cache_config"]
        model = Model(
            api=installed.api,
            eos=built.files.eos_token_ids,
            vocab_size=built.files.vocab_size,
            token_bytes=token_table(str(built.files.folder)).token_bytes,
            processors=processors,
            ranks=attention_ranks(built.args),
            priority=installed.priority,
        )
        meter = LoadMeter(model.ranks)
        told = cache.enable_block_reuse and cache.event_buffer_max_size > 0
        feeds = KvFeeds(cache.tokens_per_block, adapters.names_by_number, ranks=model.ranks) if told else None
        events = await _first_request(built.llm, model, meter, told=told)
        blocks = _created(events, model.ranks) or meter.blocks or (cache.max_tokens or 0) // cache.tokens_per_block
        if not blocks:
            raise EngineStartFailed(
                f"TensorRT-LLM has not told its number of KV blocks within {_TOLD_WITHIN_S:g} s; "
                "give enable_iter_perf_stats=true, or max_tokens in kv_cache_config"
            )
        if feeds is not None:
            feeds.put(events)
        info = _describe(config, installed, built, blocks=blocks, adapters=adapters)
    except BaseException:
        await run_in_thread(built.llm.shutdown, name="trtllm-stop")
        raise
    return Started(
        llm=built.llm,
        info=info,
        installed=installed,
        model=model,
        adapters=adapters,
        roles=roles_of(built.args),
        meter=meter,
        feeds=feeds,
    )


def _build(config: EngineConfig, installed: Installed) -> _Built:
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    files = read_model(local_folder(config.model))
    args = engine_args(
        config,
        installed.api,
        known=frozenset(TorchLlmArgs.model_fields),
        max_seq_len=files.context_length or FALLBACK_LENGTH,
        adapters=adapters_of(config, read_adapter),
    )
    if config.role not in roles_of(args):
        able = ", ".join(sorted(roles_of(args)))
        raise EngineStartFailed(f"with these settings TensorRT-LLM can be {able}, not {config.role.value}")
    check_launch(args, os.environ, gpus=_gpus())
    try:
        return _Built(installed.api.LLM(model=str(files.folder), **args), args, files)
    except WorkerError:
        raise
    except Exception as error:
        raise EngineStartFailed(f"TensorRT-LLM could not start {config.model}: {error}") from error


def _gpus() -> int | None:
    try:
        import torch
    except ImportError:
        return None
    return int(torch.cuda.device_count()) or None


async def _first_request(llm: Any, model: Model, meter: LoadMeter, *, told: bool) -> list[Mapping[str, Any]]:
    """Have the engine make one token; return the KV events of that. Statistics go to `meter`. Raises EngineStartFailed."""
    end = model.eos[0] if model.eos else 0
    params = model.api.SamplingParams(max_tokens=1, end_id=end, pad_id=end, ignore_eos=True, detokenize=False, temperature=0.0)
    events: list[Mapping[str, Any]] = []
    try:
        await llm.generate_async([end], params, streaming=True).aresult()
        async with asyncio.timeout(_TOLD_WITHIN_S):
            while not (meter.blocks and (events or not told)):
                meter.note(await poll_once(llm.get_stats_async))
                if told:
                    events += await poll_once(llm.get_kv_cache_events_async)
    except TimeoutError:
        return events
    except Exception as error:
        raise EngineStartFailed(f"TensorRT-LLM failed on its first request: {error}") from error
    return events


def _created(events: list[Mapping[str, Any]], ranks: int) -> int:
    """Return the blocks on the device of all ranks, from the events that announce the cache of the largest window.

    All ranks have as many, and the events of some may not have come yet.
    """
    announced = [event for event in events if event["data"]["type"] == "created"]
    caches = [(one.get("window_size") or 0, int(one["data"]["num_blocks_per_cache_level"][0])) for one in announced]
    return max(caches)[1] * ranks if caches else 0


def _describe(config: EngineConfig, installed: Installed, built: _Built, *, blocks: int, adapters: Adapters) -> EngineInfo:
    files, cache, settings = built.files, built.args["kv_cache_config"], built.llm.args
    ranks = attention_ranks(built.args)
    hands_over = handover_word(built.args, installed.line, cache.tokens_per_block)
    return EngineInfo(
        engine="trtllm",
        version=installed.version,
        tokenizer_dir=str(files.folder),
        context_length=int(built.args["max_seq_len"]),
        block_size=cache.tokens_per_block,
        blocks=blocks,
        slots=int(settings.max_batch_size) * ranks,
        vocab_size=files.vocab_size,
        eos_token_ids=files.eos_token_ids,
        kinds=("chat", "completion") if files.chat else ("completion",),
        step_tokens=int(settings.max_num_tokens or 0),
        adapters=adapters.names,
        handover=hands_over,
        lease_s=lease_s(built.args) if hands_over else 0.0,
        prefill_samples=bool(hands_over),
        ranks=ranks,
        parallel=shared_by(built.args),
        default_sampling=files.default_sampling,
        extra={"release_line": installed.line, "host_cache_bytes": cache.host_cache_size or 0},
    )
