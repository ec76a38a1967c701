"""Translates `EngineConfig` to vLLM's own settings.

The operator's settings are passed on unchanged; a name unknown to vLLM stops the start. Where nothing is given, some defaults
differ from vLLM's, nearly all of them for machines without a GPU; each is listed with its reason in docs/engines.md.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.lora_adapters import ADAPTERS_ARG, adapters_of
from headrace.workers.models.weight_format import weight_format
from headrace.workers.vllm.adapters import lora_args, read_adapter
from headrace.workers.vllm.connectors import check_connectors, offload_without_gpu
from headrace.workers.vllm.embeddings.settings import ENCODERS_ARG, transfer_config
from headrace.workers.vllm.pooling import pools
from headrace.workers.vllm.transfer.connector import EXTENSION, MODE_ARG, connector_config

CPU_BLOCK_SIZE = 32
CPU_MAX_SEQUENCES = 32
CPU_KV_BYTES = 512 << 20
ENCODE_CACHE_GB = 0.25  # of processed items, of which an encode worker finds none again; vLLM's default is 4

_OURS = {"model": "--model", "served_model_name": "--served-name", "seed": "--seed"}
"""Settings with an option of their own: two places for one thing would contradict each other."""

ADDED_ARGS = (MODE_ARG, ADAPTERS_ARG, ENCODERS_ARG)
"""Settings that vLLM does not have."""


def prepare_environment(config: EngineConfig, environ: MutableMapping[str, str]) -> None:
    """Set the variables vLLM reads at import, unless the operator has set them. Must run before `import vllm`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    talks = config.args.get("disable_log_stats") is False or config.args.get("enable_log_requests") is True
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if talks else "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # Forked children would inherit the broker's sockets and hold them open after this process died.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Several engines may share the cores; vLLM's binding would pin all of them to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cores),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(config.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        environ.setdefault(name, value)


_EXTERNAL_RANKS = frozenset(
    {
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_address",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
    }
)


def kv_events_wanted(config: EngineConfig) -> bool:
    """Return whether to listen to vLLM's KV events.

    Not if the operator configured them, if this engine has some ranks of several, or if there is no prefix cache to route by.
    """
    if config.role is Role.ENCODE:
        return False
    args = config.args
    settled = "kv_events_config" in args or not args.get("enable_prefix_caching", True) or pools(config)
    alone = int(args.get("data_parallel_size") or 1) == ranks(config)
    return not settled and (alone or external_rank(config) is not None)


def external_rank(config: EngineConfig) -> int | None:
    """Return which data-parallel rank this engine is, if it is one of several engines with a rank each."""
    args = config.args
    several = args.get("data_parallel_hybrid_lb") or int(args.get("data_parallel_size_local") or 1) > 1
    return None if several or args.get("data_parallel_rank") is None else int(args["data_parallel_rank"])


def ranks(config: EngineConfig) -> int:
    """Return the number of data-parallel ranks that this engine balances: one if others, or other machines, run the rest."""
    return 1 if _EXTERNAL_RANKS & config.args.keys() else int(config.args.get("data_parallel_size") or 1)


def engine_args(
    config: EngineConfig,
    *,
    kv_events: Mapping[str, Any] | None = None,
    items: Path | None = None,
) -> Any:
    """Build vLLM's `AsyncEngineArgs`. Raises EngineStartFailed for a setting that vLLM does not have or refuses.

    `kv_events`: vLLM's settings for publishing its KV events. `items`: the folder through which embeddings
    of media pass, if they do.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    check_names(config.args, [*(field.name for field in fields(AsyncEngineArgs)), *ADDED_ARGS])
    given = {name: value for name, value in config.args.items() if name not in ADDED_ARGS}
    check_connectors(given, cpu=current_platform.is_cpu())
    if current_platform.is_cpu() and config.role is Role.AGGREGATED:
        given |= offload_without_gpu(given)
    transfer = connector_config(config, cpu=current_platform.is_cpu())
    args: dict[str, Any] = {
        "model": config.model,
        "served_model_name": config.served_name,
        "seed": config.seed,
        "disable_log_stats": True,  # no log lines; its Prometheus series are shown, and load() has its numbers, all the same
        "enable_prefix_caching": None if pools(config) else True,  # whether a model that pools can use it, vLLM knows
        "enable_logging_iteration_details": True,  # not to log them: load reports tell what a step did
    }
    args |= weight_format(config.model, given)
    args |= lora_args(adapters_of(config, read_adapter))
    if kv_events is not None:
        from vllm.config.kv_events import KVEventsConfig

        args["kv_events_config"] = KVEventsConfig(**kv_events)
    if transfer is not None or given.get("kv_transfer_config") is not None:
        args["worker_extension_cls"] = EXTENSION
    if transfer is not None:
        given.pop("kv_transfer_config", None)  # null says that there is no other
        from vllm.config.kv_transfer import KVTransferConfig

        args["kv_transfer_config"] = KVTransferConfig(**transfer)
    if items is not None:
        from vllm.config.ec_transfer import ECTransferConfig

        args["ec_transfer_config"] = ECTransferConfig(**transfer_config(config.role, items))
    if config.role is Role.ENCODE:  # each item is its own and seen once: there is nothing to keep
        args |= {"enable_prefix_caching": False, "mm_processor_cache_gb": ENCODE_CACHE_GB}
    if current_platform.is_cpu():
        args |= {"block_size": CPU_BLOCK_SIZE, "max_num_seqs": CPU_MAX_SEQUENCES, "enforce_eager": True}
    try:
        return AsyncEngineArgs(**args | given)
    except (TypeError, ValueError) as error:
        raise EngineStartFailed(f"vLLM refuses its settings: {error}") from error


def check_names(args: Mapping[str, Any], known: list[str]) -> None:
    """Raise EngineStartFailed for the first setting not in `known`, naming what is spelt like it."""
    for name in args:
        if name in _OURS:
            raise EngineStartFailed(f"give {name!r} as {_OURS[name]}, not as an engine setting")
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.6)
            hint = f"; close to it: {', '.join(close)}" if close else ""
            raise EngineStartFailed(f"vLLM has no setting {name!r}{hint}")


def prepare_children(vllm_config: Any, environ: MutableMapping[str, str]) -> None:
    """Set what only the engine's processes read, once it is known what they will run. Must run before they are started.

    Some of vLLM's sampling code is compiled on first use even in eager mode.  Without a GPU that takes a C++ compiler and
    stalled the first request for log probabilities, and all others with it, for 17 s.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and vllm_config.model_config.enforce_eager:
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def computes_in_core(config: EngineConfig, environ: Mapping[str, str], *, ranks: int) -> bool:
    """Return whether vLLM's core computes by itself without a GPU; else it has a process for each rank.

    vLLM wants those so that it can bind their threads to cores.  Where nothing is bound and one rank is all there is, such a
    process gains nothing: it imports vLLM once more, which takes its time and memory, and each step goes to it and back.
    """
    unbound = environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    return unbound and ranks == 1 and config.args.get("distributed_executor_backend") is None


def size_kv_cache(vllm_config: Any) -> None:
    """Set the KV cache size without a GPU and a setting: 512 MiB or two full sequences, at most half of the free memory."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm_config.cache_config.kv_cache_memory_bytes is not None:
        return
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    per_token = 2 * model.get_num_layers(parallel) * heads * model.dtype.itemsize
    wanted = max(CPU_KV_BYTES, 2 * per_token * model.max_model_len)
    vllm_config.cache_config.kv_cache_memory_bytes = max(CPU_KV_BYTES, min(wanted, _free_memory() // 2))


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
