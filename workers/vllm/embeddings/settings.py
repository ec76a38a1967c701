"""Decides whether an engine hands embeddings of media over, and in which direction. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.embeddings.identity import model_files, model_identity, namespace, settings_identity

ENCODERS_ARG = "encoders"
"""Whether a serving worker takes embeddings from encode workers."""

FOLDER = "folder"
MODULE = "headrace.workers.vllm.embeddings.connector"
CONNECTOR = "EmbeddingConnector"

_NODES = ("nnodes", "node_rank")
_OTHERS_ROLE = ("kv_transfer_config", "kv_transfer_mode", "enable_lora", "adapters", "kv_offloading_size")
"""Settings that an engine without a KV cache has no use for."""

_WITHOUT_EFFECT = (
    ENCODERS_ARG,
    "kv_transfer_mode",
    "block_size",
    "dtype",  # it stands in the word as it turned out
    "enable_lora",
    "enable_prefix_caching",
    "enforce_eager",
    "limit_mm_per_prompt",
    "max_loras",
    "max_lora_rank",
    "max_model_len",
    "mm_processor_cache_gb",
    "prefix_caching_hash_algo",
    "seed",
    "tensor_parallel_size",
)
"""Settings in which an encode worker may differ from those that it encodes for: they change nothing in embeddings."""


def hands_over_embeddings(config: EngineConfig) -> bool:
    """Return whether the engine needs the connector. Raises EngineStartFailed for settings that contradict each other."""
    given = config.args.get(ENCODERS_ARG)
    if given not in (None, True, False):
        raise EngineStartFailed(f"{ENCODERS_ARG} is true or false, not {given!r}")
    encodes = config.role is Role.ENCODE
    if encodes and given is not None:
        raise EngineStartFailed(f"{ENCODERS_ARG} is for workers that serve; one of the role 'encode' is an encoder")
    if not encodes and not given:
        return False
    if config.args.get("ec_transfer_config") is not None:
        raise EngineStartFailed(f"{ENCODERS_ARG}, or the role 'encode', and ec_transfer_config both choose vLLM's connector")
    if any(int(config.args.get(name) or 0) > (name == "nnodes") for name in _NODES):
        raise EngineStartFailed("embeddings are not handed over by an engine on several machines")
    if encodes:
        for name in _OTHERS_ROLE:
            if config.args.get(name) not in (None, False):
                raise EngineStartFailed(f"an encode worker has no KV cache and no language model: it takes no {name}")
    return True


def transfer_config(role: Role, folder: Path) -> dict[str, Any]:
    """Build vLLM's `ec_transfer_config`. `folder`: where the worker and the core pass items."""
    return {
        "ec_connector": CONNECTOR,
        "ec_connector_module_path": MODULE,
        "ec_role": "ec_producer" if role is Role.ENCODE else "ec_consumer",
        "ec_connector_extra_config": {FOLDER: str(folder)},
    }


def encoder_word(config: EngineConfig, *, version: str, dtype: str, device: str) -> str:
    """Return a word that is equal for engines that make the same of an item. Raises EngineStartFailed.

    It depends on the model's files, vLLM, the kind of device, and every setting that is not known to have no effect.
    """
    files = model_identity(model_files(config.model, config.args.get("revision")))
    settings = settings_identity(config.args, without=_WITHOUT_EFFECT)
    return f"vllm/{version}/{device}/{dtype}/{namespace(files, settings)}"


def check_encoders(args: Mapping[str, Any]) -> None:
    """Raise EngineStartFailed for a value that `encoders` cannot have, before anything is started."""
    if args.get(ENCODERS_ARG) not in (None, True, False):
        raise EngineStartFailed(f"{ENCODERS_ARG} is true or false, not {args[ENCODERS_ARG]!r}")
