"""Reads the LoRA adapters that a worker starts with (`adapters={"name": "folder", …}`) and keeps those that it has.

Clients see each adapter as a model of its own. SGLang loads and unloads adapters by name and keeps the cached blocks of each
load apart by an id of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.workers.lora_adapters import read_config


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its rank and the modules that it changes decide what room the engine needs."""

    name: str
    folder: str
    rank: int
    modules: tuple[str, ...]


def read_adapter(name: str, folder: str, _number: int = 0) -> Adapter:
    """Read an adapter from its folder. Raises EngineError if there is none."""
    config = read_config(name, folder)
    return Adapter(name, folder, config.rank, config.modules)


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
