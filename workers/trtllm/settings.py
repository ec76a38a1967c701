"""Translates `EngineConfig` to TensorRT-LLM's own settings.

The operator's settings are passed on unchanged; a name that TensorRT-LLM does not have stops the start. `kv_cache_config`,
`cache_transceiver_config` and `lora_config` are given as maps of their fields.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.lora_adapters import ADAPTERS_ARG
from headrace.workers.trtllm.adapters import Adapter, lora_settings
from headrace.workers.trtllm.logits import PROCESSORS_ARG

OWN_ARGS = frozenset({ADAPTERS_ARG, PROCESSORS_ARG})
EVENT_BUFFER = 16384  # KV events that the engine keeps until they are polled
_OURS = {"model": "--model", "served_model_name": "--served-name"}
_TRANSCEIVER = "cache_transceiver_config"

LOG_LEVELS: Mapping[str, str] = {
    "debug": "verbose",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "critical": "internal_error",
}
"""Our log level → TensorRT-LLM's (`TLLM_LOG_LEVEL`)."""


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that TensorRT-LLM reads at import, unless the operator has set them."""
    level = environ.get("HEADRACE_LOG_LEVEL", "info").lower()
    environ.setdefault("TLLM_LOG_LEVEL", LOG_LEVELS.get(level, "info"))
    environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def engine_args(
    config: EngineConfig, api: Any, *, known: frozenset[str], max_seq_len: int, adapters: Mapping[str, Adapter]
) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM's `LLM`. Raises EngineStartFailed for a setting that it has not or refuses.

    `known`: the names of its settings. `max_seq_len`: the context length where the operator gives none.
    """
    given = {name: value for name, value in config.args.items() if name not in OWN_ARGS}
    check_names(given, known)
    args: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "enable_chunked_prefill": True,  # else a prompt longer than a step is refused
        "enable_iter_perf_stats": True,  # load reports are made of them
        "guided_decoding_backend": "xgrammar",
    }
    if config.role is Role.PREFILL:
        args["disable_overlap_scheduler"] = True  # which cannot run context-only requests
    args |= given
    try:
        args["kv_cache_config"] = _kv_cache_config(api, given.get("kv_cache_config"))
        transceiver = given.get(_TRANSCEIVER)
        if transceiver is None and config.role is not Role.AGGREGATED:
            transceiver = {"backend": "DEFAULT"}
        if isinstance(transceiver, Mapping):
            transceiver = api.CacheTransceiverConfig(**transceiver)
        args[_TRANSCEIVER] = transceiver
        lora = given.get("lora_config") or lora_settings(adapters)
        if lora:
            from tensorrt_llm.lora_helper import LoraConfig

            args["lora_config"] = LoraConfig(**lora)
    except (TypeError, ValueError) as error:
        raise EngineStartFailed(f"TensorRT-LLM refuses its settings: {error}") from error
    return {name: value for name, value in args.items() if value is not None}


def check_names(args: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise EngineStartFailed for the first setting not in `known`, naming what is spelt like it."""
    for name in args:
        if name in _OURS:
            raise EngineStartFailed(f"give {name!r} as {_OURS[name]}, not as an engine setting")
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.6)
            hint = f"; close to it: {', '.join(close)}" if close else ""
            raise EngineStartFailed(f"TensorRT-LLM has no setting {name!r}{hint}")


def roles_of(args: Mapping[str, Any]) -> frozenset[Role]:
    """Return the roles that an engine with these arguments can have."""
    if args.get(_TRANSCEIVER) is None:
        return frozenset({Role.AGGREGATED})
    if args.get("disable_overlap_scheduler"):
        return frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE})
    return frozenset({Role.AGGREGATED, Role.DECODE})


def lease_s(args: Mapping[str, Any]) -> float:
    """Return the seconds for which the context side keeps blocks that are not fetched."""
    timeout_ms = getattr(args.get(_TRANSCEIVER), "kv_transfer_timeout_ms", None)
    return (60_000 if timeout_ms is None else timeout_ms) / 1000


def handover_word(args: Mapping[str, Any], line: str, block_size: int) -> str:
    """Return the name of the hand-over method, "" without one. Only engines with equal names can hand over."""
    transceiver = args.get(_TRANSCEIVER)
    if transceiver is None:
        return ""
    return f"trtllm/{str(transceiver.backend or 'DEFAULT').lower()}/{line}/{block_size}"


def _kv_cache_config(api: Any, given: Any) -> Any:
    if given is not None and not isinstance(given, Mapping):
        raise EngineStartFailed(
            f'kv_cache_config must be a map of its fields, such as {{"tokens_per_block": 32}}, got {given!r}'
        )
    fields: dict[str, Any] = {"enable_block_reuse": True, "event_buffer_max_size": EVENT_BUFFER, **(given or {})}
    if fields.get("kv_events_config") is not None:
        raise EngineStartFailed("kv_events_config is refused by TensorRT-LLM itself: give event_buffer_max_size")
    if not fields["enable_block_reuse"]:
        fields["event_buffer_max_size"] = 0  # there is nothing to tell
    return api.KvCacheConfig(**fields)
