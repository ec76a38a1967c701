"""Translates `EngineConfig` to SGLang's `ServerArgs`, with defaults for machines without a GPU.

The operator's settings are passed on unchanged; a name unknown to SGLang stops the start. Defaults that differ from SGLang's
are listed with their reasons in docs/engines.md.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.workers.engine import EngineConfig
from headrace.workers.engine_settings import EngineSettings, annotated, package_folder, parsed
from headrace.workers.kit import cores, set_defaults
from headrace.workers.lora import ADAPTERS_ARG, Adapter, adapters_of
from headrace.workers.model_files import architectures, weight_format


def lora_args(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Return SGLang's settings for these adapters: room for all in one batch, of the largest rank."""
    if not adapters:
        return {}
    modules = sorted({module for adapter in adapters.values() for module in adapter.modules})
    return {
        "enable_lora": True,
        "max_lora_rank": max(adapter.rank for adapter in adapters.values()),
        "max_loras_per_batch": len(adapters) + 1,  # and the model without one
        "lora_paths": [f"{adapter.name}={adapter.folder}" for adapter in adapters.values()],
        **({"lora_target_modules": modules} if modules else {}),
    }


CPU_PAGE_SIZE = 32
CPU_MAX_SEQUENCES = 32
CPU_KV_BYTES = 512 << 20
CPU_KV_TOKENS = 32_768  # where the model's files do not tell what a token takes

_WIDTH = {"float32": 4, "float": 4}  # bytes of a number; all other types have two


def computes_on_cpu(args: Mapping[str, Any], *, gpu: bool) -> bool:
    """Return whether SGLang is to compute on the CPU: by its setting `device`, else where there is no GPU."""
    device = args.get("device")
    return device == "cpu" if device is not None else not gpu


def prepare_environment(config: EngineConfig, environ: MutableMapping[str, str], *, cpu: bool) -> None:
    """Set the variables that SGLang reads at import, unless the operator has set them."""
    defaults = {}
    if follows(config):
        defaults["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # or SGLang's constructor waits for the end of its processes
    if cpu:
        defaults |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": cores()}
    set_defaults(environ, config.model, defaults)


def kv_events_wanted(config: EngineConfig) -> bool:
    """Return whether to listen to SGLang's KV events.

    Not on a node after the first, if the operator configured them, if ranks on other machines have a cache each, or if there is
    no prefix cache to route by.
    """
    args = config.args
    if follows(config):
        return False
    settled = "kv_events_config" in args or args.get("disable_radix_cache") or args.get("is_embedding")
    return not settled and (ranks(config) == 1 or int(args.get("nnodes") or 1) == 1)


def ranks(config: EngineConfig) -> int:
    return int(config.args.get("dp_size") or 1)


def makes_vectors(config: EngineConfig) -> bool:
    """Return whether the engine makes vectors: by its setting, else where the model's files name no head that generates."""
    if config.args.get("is_embedding") is not None:
        return bool(config.args["is_embedding"])
    named = architectures(config.model)
    return bool(named) and not any("ForCausalLM" in name or "ForConditionalGeneration" in name for name in named)


def follows(config: EngineConfig) -> bool:
    """Return whether this is a node of several and not the first, which alone takes requests."""
    return int(config.args.get("node_rank") or 0) > 0


def server_args(
    config: EngineConfig,
    *,
    cpu: bool,
    kv_events: Mapping[str, Any] | None = None,
    rendezvous: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of SGLang's `ServerArgs`. Raises EngineStartFailed for adapters that cannot be loaded.

    `kv_events` and `rendezvous` are SGLang's settings for publishing its KV events and for the engine's role.
    """
    given = {name: value for name, value in config.args.items() if name != ADAPTERS_ARG}
    args: dict[str, Any] = {
        "model_path": config.model,
        "served_model_name": config.served_name,
        "random_seed": config.seed,
        "log_level": "warning",
        "incremental_streaming_output": True,  # a chunk has the ids since the last one
        "stream_interval": 1,
        "schedule_low_priority_values_first": True,  # as requests here mean it, and as vLLM has it
        "enable_metrics": True,
    }
    args |= weight_format(config.model, given)
    args |= lora_args(adapters_of(config))
    if kv_events is not None:
        args["kv_events_config"] = msgspec.json.encode(kv_events).decode()
    args |= rendezvous or {}
    if makes_vectors(config):
        args["disable_radix_cache"] = True  # else a repeated input is pooled over its last tokens alone
    if cpu:
        args |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "page_size": CPU_PAGE_SIZE,
            "max_running_requests": CPU_MAX_SEQUENCES,
            "sleep_on_idle": True,  # or an engine without work takes a whole core from those that have some
        }
        if "enable_lora" in args or given.get("enable_lora"):
            args["lora_backend"] = "torch_native"
        if not {"max_total_tokens", "mem_fraction_static"} & given.keys():
            args["max_total_tokens"] = kv_tokens(config, given)
        args.setdefault("mem_fraction_static", 0.3)
    return args | given


def kv_tokens(config: EngineConfig, given: Mapping[str, Any]) -> int:
    """Return the size of the KV cache without a GPU and a setting: 512 MiB or two full sequences, whichever is more."""
    try:
        model = msgspec.json.decode((Path(config.model) / "config.json").read_bytes())
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        width = _WIDTH.get(str(given.get("dtype")), 2)
        token = 2 * model["num_hidden_layers"] * heads * size * width
        context = int(given.get("context_length") or model.get("max_position_embeddings") or 2048)
        page = int(given.get("page_size") or CPU_PAGE_SIZE)
        return int(max(CPU_KV_BYTES // token, 2 * context) // page * page)
    except (OSError, KeyError, TypeError, ValueError, msgspec.DecodeError):
        return CPU_KV_TOKENS


_SOURCES = Path("srt", "arg_groups", "fields")  # a class in each file; `ServerArgs` has the fields of all of them
_ONE_OF_THEM = "page_size"


def sglang_settings(package: Path | None = None) -> dict[str, str]:
    """Return name → annotation of the settings of the SGLang in the folder `package`, by default the one that is installed.

    Empty where there is none, or where its source is not as expected.
    """
    package = package or package_folder("sglang")
    classes = parsed((package / _SOURCES).glob("*.py")) if package is not None else []
    found = {name: _annotation(given) for node in classes for name, given in annotated(node.body).items()}
    return found if _ONE_OF_THEM in found else {}


def _annotation(node: ast.expr) -> str:
    """Return the type of `A[type, help]`, SGLang's own spelling of `Annotated`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and ast.unparse(node.value) in ("A", "Annotated"):
        node = node.slice.elts[0]
    return ast.unparse(node)


SETTINGS = EngineSettings(
    "SGLang",
    packages=("torch", "sglang"),
    install=(
        "in a checkout `make install ENGINE=sglang` installs it; elsewhere, with a GPU, pip install 'headrace[sglang]' does, "
        "in an environment of its own"
    ),
    options={"model_path": "--model", "model": "--model", "served_model_name": "--served-name", "random_seed": "--seed"},
    added={ADAPTERS_ARG: ""},
    read=sglang_settings,
)
