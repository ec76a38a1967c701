"""Translates `EngineConfig` to TensorRT-LLM's own settings.

The operator's settings are passed on unchanged; a name that TensorRT-LLM does not have stops the start. `kv_cache_config`,
`cache_transceiver_config` and `lora_config` are given as maps of their fields.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Role
from headrace.workers.engine_settings import (
    EngineSettings,
    Fields,
    annotated,
    check_plain_types,
    package_folder,
    parsed,
    spelt_like,
)
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.lora import ADAPTERS_ARG, Adapter
from headrace.workers.trtllm.contract import check_package

# TensorRT-LLM has no call that loads or unloads an adapter: a request names it with a number and a folder, its weights are
# read then, and the least recently used ones leave its caches. So an adapter is added by checking its folder, and removed by
# no longer naming it; each load gets a new number, because weights are cached by it.

LEAST_ROOM = 4  # adapters on the GPU; as many again in host memory


def lora_settings(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Return the fields of TensorRT-LLM's `LoraConfig` with room for these adapters; empty without any."""
    if not adapters:
        return {}
    room = max(LEAST_ROOM, len(adapters))
    return {
        "lora_dir": [adapter.folder for adapter in adapters.values()],  # tells which modules have adapters
        "max_lora_rank": max(adapter.rank for adapter in adapters.values()),
        "max_loras": room,
        "max_cpu_loras": 2 * room,
    }


def lora_request(api: Any, adapter: Adapter | None) -> Any:
    """Return TensorRT-LLM's request for an adapter, None for the model itself."""
    if adapter is None:
        return None
    return api.LoRARequest(lora_name=adapter.name, lora_int_id=adapter.number, lora_path=adapter.folder)


PROCESSORS_ARG = "logits_processors"


def logit_bias(sampling: Sampling, vocab_size: int) -> NDArray[np.float32] | None:
    """Return the bias of every token id, None where there is none. Raises RequestInvalid for an id out of range.

    Only the ids of `allowed_token_ids` keep a finite one.
    """
    if not sampling.logit_bias and sampling.allowed_token_ids is None:
        return None
    for name, ids in (("logit_bias", sampling.logit_bias), ("allowed_token_ids", sampling.allowed_token_ids or ())):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestInvalid(f"{name} has token {token}; the vocabulary has {vocab_size}", param=name)
    if sampling.allowed_token_ids is None:
        bias = np.zeros(vocab_size, np.float32)
    else:
        bias = np.full(vocab_size, -np.inf, np.float32)
        bias[sampling.allowed_token_ids] = 0.0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    return bias


class LogitsProcessors:
    """The logits processors of an engine, by the name with which a request asks for one (`extra.logits_processors`)."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = dict(known)

    @classmethod
    def of(cls, config: EngineConfig) -> LogitsProcessors:
        """Import the processors of the engine's settings, a map of names to `module:Class`. Raises EngineStartFailed."""
        given = config.args.get(PROCESSORS_ARG) or {}
        if not isinstance(given, Mapping):
            raise EngineStartFailed(
                f'{PROCESSORS_ARG} must be a map of names to classes, such as {{"calm": "mine:Calm"}}, got {given!r}'
            )
        known = {}
        for name, place in given.items():
            module, _, attribute = str(place).partition(":")
            try:
                made = getattr(importlib.import_module(module), attribute)
                known[str(name)] = made() if isinstance(made, type) else made
            except Exception as error:  # the operator's own code
                raise EngineStartFailed(
                    f"{PROCESSORS_ARG}: {name!r} cannot be made of {place!r}: {type(error).__name__}: {error}"
                ) from error
        return cls(known)

    def chosen(self, extra: Mapping[str, Any]) -> list[Any] | None:
        """Return the processors that a request asks for, in its order. Raises RequestInvalid for an unknown name."""
        wanted = extra.get(PROCESSORS_ARG)
        if wanted is None:
            return None
        if not isinstance(wanted, list):
            raise RequestInvalid(f"{PROCESSORS_ARG} must be a list of names, got {wanted!r}", param=PROCESSORS_ARG)
        for name in wanted:
            if name not in self._known:
                served = ", ".join(self._known) or "none"
                raise RequestInvalid(f"this worker has no logits processor {name!r}; it has: {served}", param=PROCESSORS_ARG)
        return [self._known[name] for name in wanted] or None


OWN_ARGS = {ADAPTERS_ARG: "", PROCESSORS_ARG: ""}
EVENT_BUFFER = 16384  # KV events that the engine keeps until they are polled
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
    config: EngineConfig, api: Any, *, known: Iterable[str], max_seq_len: int, adapters: Mapping[str, Adapter]
) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM's `LLM`. Raises EngineStartFailed for a setting that it has not or refuses.

    `known`: the names of its settings. `max_seq_len`: the context length where the operator gives none.
    """
    SETTINGS.check_names(config.args, known)
    given = {name: value for name, value in config.args.items() if name not in OWN_ARGS}
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


_SOURCE = Path("llmapi", "llm_args.py")
_SETTINGS = "TorchLlmArgs"
_MAPS = {"kv_cache_config": "KvCacheConfig", "cache_transceiver_config": "CacheTransceiverConfig"}  # given as maps
_BOUNDED = re.compile(r"\b(?:Positive|NonNegative|Strict)(Int|Float)\b")  # pydantic's names of numbers with bounds


class TrtllmSettings(EngineSettings):
    def check_packages(self, *modules: str) -> None:
        check_package()

    def check_arguments(self, args: Mapping[str, Any]) -> None:
        super().check_arguments(args)
        classes = trtllm_settings() if args else {}
        for name, of in _MAPS.items():
            fields, value = classes.get(of), args.get(name)
            if fields and isinstance(value, Mapping):
                for field in value:
                    if field not in fields:
                        raise EngineStartFailed(f"{name} of TensorRT-LLM has no field {field!r}{spelt_like(field, fields)}")
                check_plain_types(f"TensorRT-LLM's {name}", value, fields)


SETTINGS = TrtllmSettings(
    "TensorRT-LLM",
    packages=("tensorrt_llm",),
    install="",
    options={"model": "--model", "served_model_name": "--served-name"},
    added=OWN_ARGS,
    read=lambda: trtllm_settings().get(_SETTINGS, {}),
)


def trtllm_settings(package: Path | None = None) -> dict[str, Fields]:
    """Return the settings of the TensorRT-LLM in the folder `package`, by default the one that is installed, by class.

    Empty where there is none, or where its source is not as expected.
    """
    package = package or package_folder("tensorrt_llm")
    classes = {node.name: node for node in parsed([package / _SOURCE])} if package is not None else {}
    found = {name: _fields(name, classes) for name in (_SETTINGS, *_MAPS.values())}
    return found if "max_batch_size" in found[_SETTINGS] else {}


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Fields:
    """Return the fields of a class and of its bases, as far as the same file has them."""
    node = classes.get(name)
    if node is None:
        return {}
    fields: dict[str, str] = {}
    others = {other: one for other, one in classes.items() if other != name}  # no class is its own base
    for base in node.bases:
        fields |= _fields(ast.unparse(base), others)
    for field, given in annotated(node.body).items():
        annotation = ast.unparse(given)
        if not annotation.startswith("ClassVar"):
            fields[field] = _BOUNDED.sub(lambda match: match[1].lower(), annotation)
    return fields
