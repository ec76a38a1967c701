"""Reads the LoRA adapters that a worker starts with (`adapters={"name": "folder", …}`) and keeps those that it has.

Clients see each adapter as a model of its own. SGLang loads and unloads adapters by name and keeps the cached blocks of each
load apart by an id of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed

ADAPTERS_ARG = "adapters"
ADAPTER_OPERATIONS = frozenset({"load_adapter", "unload_adapter"})
CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its rank and the modules that it changes decide what room the engine needs."""

    name: str
    folder: str
    rank: int
    modules: tuple[str, ...]


def adapters_of(config: EngineConfig) -> dict[str, Adapter]:
    """Read the adapters of the engine's settings. Raises EngineStartFailed with the reason."""
    given = config.args.get(ADAPTERS_ARG) or {}
    if not isinstance(given, Mapping):
        raise EngineStartFailed(f"{ADAPTERS_ARG} must be a map of names to folders, got {given!r}")
    found = {}
    for name, folder in given.items():
        if not name or not isinstance(folder, str):
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} must name a folder, got {folder!r}")
        if name == config.served_name:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} is the name of the model itself")
        try:
            found[name] = read_adapter(name, folder)
        except EngineError as error:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {error}") from None
    return found


def read_adapter(name: str, folder: str) -> Adapter:
    """Read an adapter's configuration. Raises EngineError if the folder has no adapter."""
    path = Path(folder) / CONFIG
    try:
        about = json.loads(path.read_bytes())
        rank, modules = about["r"], about.get("target_modules") or ()
    except OSError as error:
        raise EngineError(f"{name!r} is no adapter: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path} is no adapter's configuration: {error!r}") from None
    if not isinstance(rank, int) or rank < 1:
        raise EngineError(f"{name!r} has rank {rank!r}; it must be 1 or more")
    return Adapter(name, folder, rank, (modules,) if isinstance(modules, str) else tuple(modules))


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
