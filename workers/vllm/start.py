"""Starts vLLM: settings, environment, the blocking construction, and the description of the started engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import EngineConfig, EngineInfo, Role, several
from headrace.workers.errors import EngineStartFailed, WorkerError
from headrace.workers.lora_adapters import adapters_of
from headrace.workers.models.download_progress import growth_reported
from headrace.workers.models.model_check import hub_folder
from headrace.workers.models.tokenizer_file import tokenizer_folder
from headrace.workers.vllm.adapters import Adapters, load_adapters, read_adapter
from headrace.workers.vllm.embeddings.settings import encoder_word
from headrace.workers.vllm.forked_core import forked_core, may_fork
from headrace.workers.vllm.load_meter import LoadMeter
from headrace.workers.vllm.media_support import NO_MEDIA, MediaSupport, offered_media
from headrace.workers.vllm.missing_packages import missing_code
from headrace.workers.vllm.pooling import class_labels, pooling_kinds
from headrace.workers.vllm.settings import (
    computes_in_core,
    engine_args,
    prepare_children,
    prepare_environment,
    ranks,
    size_kv_cache,
)
from headrace.workers.vllm.stats_log import no_prometheus, shows_metrics
from headrace.workers.vllm.transfer.connector import ConnectorChoice, check_role, describe_transfer, handover_word
from headrace.workers.vllm.transfer.side_channel import side_channel

_log = structlog.get_logger()

_DOWNLOAD_STEP_MB = 50.0
_DOWNLOAD_LOOK_S = 1.0

NO_DEVICE = (
    "vLLM {version} finds nothing to compute on: it is built for GPUs, and none can be used. Does `nvidia-smi` list one? "
    "For a machine without a GPU there is the CPU build: `make clean`, then `make install ENGINE=vllm`"
)
POOLING_TASKS = frozenset({"embed", "classify", "token_embed", "token_classify"})


@dataclass(frozen=True, slots=True)
class Started:
    """A running AsyncLLM, its description, and its way to move blocks, if it can."""

    llm: Any
    info: EngineInfo
    transfer: ConnectorChoice | None = None
    adapters: Adapters | None = None  # None for an engine that generates nothing
    offer: MediaSupport = NO_MEDIA
    cpu: bool = False  # it computes without a GPU
    logs_stats: bool = False  # log lines of its statistics were asked for
    encodes: bool = False  # it runs encoders for other workers, and no language model


async def start_vllm(
    config: EngineConfig,
    meter: LoadMeter,
    kv_events: Mapping[str, Any] | None = None,
    *,
    items: Path | None = None,
) -> Started:
    """Import vLLM, load the model and wait until the core is ready. Raises EngineStartFailed.

    `kv_events`: where vLLM is to publish its KV events. `items`: the
    folder through which embeddings of media pass, if they do.
    """
    adapters = adapters_of(config, read_adapter)
    prepare_environment(config, os.environ)
    with _download_reported(config):
        started = await run_in_thread(lambda: _build(config, meter, kv_events, items), name="vllm-start")
    # The first call binds vLLM's sockets to this event loop and caches the answer that every later request needs.
    tasks = await started.llm.get_supported_tasks()
    if "generate" in tasks:
        offer = await offered_media(started.llm)
        # A hand-over counts tokens, and of an item whose length depends on it only vLLM knows how many these are.
        known = all(slot.tokens for slot in offer.slots.values())
        info = replace(started.info, media=offer.slots, hands_over_media=bool(started.info.handover) and known)
        started = replace(started, info=info, offer=offer)
        await load_adapters(started.llm, adapters)
        lora = started.llm.vllm_config.lora_config
        running = Adapters(started.llm, adapters, most_rank=lora.max_lora_rank if lora is not None else None)
        return replace(started, info=replace(started.info, adapters=running.names), adapters=running)
    model = started.llm.vllm_config.model_config
    if not POOLING_TASKS & set(tasks):
        raise EngineStartFailed(f"{config.model} does not generate text; vLLM offers: {', '.join(tasks) or 'nothing'}")
    return replace(started, info=replace(started.info, kinds=pooling_kinds(model, tasks), labels=class_labels(model)))


def _download_reported(config: EngineConfig) -> AbstractContextManager[None]:
    """Log how much of a model has arrived while it comes from its hub: `model.downloading`."""
    folder = hub_folder(config.model, config.args, os.environ)
    if folder is None:
        return nullcontext()

    def tell(arrived_mb: float | None) -> None:
        arrived = {"done": True} if arrived_mb is None else {"arrived_mb": round(arrived_mb)}
        _log.info("model.downloading", model=config.model, **arrived)

    return growth_reported(folder, tell, step_mb=_DOWNLOAD_STEP_MB, every_s=_DOWNLOAD_LOOK_S)


def _build(config: EngineConfig, meter: LoadMeter, kv_events: Mapping[str, Any] | None, items: Path | None) -> Started:
    try:
        import vllm
    except ImportError as error:
        raise EngineStartFailed(f"vLLM is not installed or broken ({error}); `make install ENGINE=vllm` installs it") from error
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_unspecified():  # vLLM itself would only say that a "device string must not be empty"
        raise EngineStartFailed(NO_DEVICE.format(version=vllm.__version__))
    try:
        args = engine_args(config, kv_events=kv_events, items=items)
        vllm_config = args.create_engine_config()
        size_kv_cache(vllm_config)
        parallel = vllm_config.parallel_config
        if current_platform.is_cpu() and computes_in_core(config, os.environ, ranks=parallel.world_size):
            parallel.distributed_executor_backend = "uni"
        prepare_children(vllm_config, os.environ)
        transfer = describe_transfer(vllm_config)
        check_role(config.role, transfer, getattr(vllm_config.kv_transfer_config, "kv_connector", None))
        with (
            side_channel(os.environ, host=config.peer_host, ranks=parallel.data_parallel_size) if transfer else nullcontext(),
            forked_core(os.environ) if may_fork(vllm_config, cpu=current_platform.is_cpu()) else nullcontext(),
        ):
            llm = AsyncLLM.from_vllm_config(
                vllm_config,
                stat_loggers=[meter.factory(), *([] if shows_metrics(config.args) else [no_prometheus()])],
                disable_log_stats=args.disable_log_stats,
                enable_log_requests=args.enable_log_requests,
            )
    except WorkerError:
        raise
    except Exception as error:
        told = missing_code(str(error)) or str(error)
        raise EngineStartFailed(f"vLLM could not start {config.model}: {told}") from error
    info = _describe(llm, vllm.__version__, transfer, ranks=ranks(config))
    if items is not None:
        info = replace(info, encoder=_encoder(config, info, current_platform.device_type))
    return Started(llm, info, transfer, cpu=current_platform.is_cpu(), encodes=config.role is Role.ENCODE)


def _encoder(config: EngineConfig, info: EngineInfo, device: str) -> str:
    return encoder_word(config, version=info.version, dtype=str(info.extra["dtype"]), device=device)


def _describe(llm: Any, version: str, transfer: ConnectorChoice | None, *, ranks: int) -> EngineInfo:
    vllm_config = llm.vllm_config
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return EngineInfo(
        engine="vllm",
        version=version,
        tokenizer_dir=str(tokenizer_folder(model.tokenizer, model.tokenizer_revision, llm.renderer.get_tokenizer)),
        context_length=model.max_model_len,
        block_size=cache.block_size,
        blocks=cache.num_gpu_blocks or 0,  # an encoder has none
        slots=vllm_config.scheduler_config.max_num_seqs * ranks,
        ranks=ranks,
        parallel=_parallel(vllm_config.parallel_config),
        vocab_size=model.get_vocab_size(),
        eos_token_ids=_eos_ids(llm),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        handover=handover_word(transfer.mode, version, vllm_config) if transfer else "",
        lease_s=transfer.lease_s if transfer else 0.0,
        lends=transfer is not None and transfer.lends,
        prompt_embeds=bool(model.enable_prompt_embeds),
        default_sampling=model.get_diff_sampling_param(),
        extra={
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_tokens": cache.block_size * (cache.num_gpu_blocks or 0),
        },
    )


def _parallel(parallel: Any) -> dict[str, int]:
    """Return the ranks that share the model. Experts are spread over all ranks of layers and data, or over none."""
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    experts = tensor * data if parallel.enable_expert_parallel else 1
    return several(tensor=tensor, pipeline=parallel.pipeline_parallel_size, expert=experts)


def _eos_ids(llm: Any) -> tuple[int, ...]:
    """Return the end tokens: the tokenizer's first, then the ones that the generation config adds."""
    configured = llm.model_config.try_get_generation_config().get("eos_token_id") or ()
    ids = [llm.renderer.get_eos_token_id(), *([configured] if isinstance(configured, int) else configured)]
    return tuple(dict.fromkeys(token for token in ids if token is not None))
