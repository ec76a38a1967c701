"""Knows a worker's LoRA adapters: those of its start (`adapters={"name": "folder", …}`), and those added while it serves.

TensorRT-LLM has no call that loads or unloads an adapter: a request names it with a number and a folder, its weights are read
then, and the least recently used ones leave its caches. So an adapter is added by checking its folder, and removed by no longer
naming it; each load gets a new number, because weights are cached by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine

ADAPTERS_ARG = "adapters"
ADAPTER_OPERATIONS = frozenset({"load_adapter", "unload_adapter"})
CONFIG = "adapter_config.json"
LEAST_ROOM = 4  # adapters on the GPU; as many again in host memory


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `number` is the engine's id of it, from 1."""

    name: str
    folder: str
    rank: int
    number: int


def adapters_of(config: EngineConfig) -> dict[str, Adapter]:
    """Read the adapters of the engine's settings. Raises EngineStartFailed with the reason."""
    given = config.args.get(ADAPTERS_ARG) or {}
    if not isinstance(given, Mapping):
        raise EngineStartFailed(
            f'{ADAPTERS_ARG} must be a map of names to folders, such as {{"fr": "/models/fr"}}, got {given!r}'
        )
    found = {}
    for number, (name, folder) in enumerate(given.items(), 1):
        if not name or not isinstance(folder, str):
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} must name a folder, got {folder!r}")
        if name == config.served_name:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} is the name of the model itself")
        try:
            found[name] = Adapter(name, folder, _read_rank(name, Path(folder)), number)
        except EngineError as error:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {error}") from None
    return found


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


def _read_rank(name: str, folder: Path) -> int:
    """Read an adapter's rank. Raises EngineError if the folder has no adapter."""
    path = folder / CONFIG
    try:
        rank = json.loads(path.read_bytes())["r"]
    except OSError as error:
        raise EngineError(f"{name!r} is no adapter: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is no adapter's configuration: {error!r}") from None
    if not isinstance(rank, int) or rank < 1:
        raise EngineError(f"{name!r} has rank {rank!r}, which must be a number from 1 on")
    return rank


class Adapters:
    """The adapters of a running engine. `most_rank`: the rank that it has room for, None = it was started without room."""

    def __init__(self, api: Any, started_with: Mapping[str, Adapter], *, most_rank: int | None) -> None:
        self._api = api
        self._there = dict(started_with)
        self._most_rank = most_rank
        self._last = len(self._there)
        self.names_by_number: dict[int, str] = {one.number: one.name for one in self._there.values()}

    @property
    def changeable(self) -> bool:
        return self._most_rank is not None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._there)

    def load(self, name: str, folder: str) -> None:
        """Add an adapter; does nothing if it is there from this folder. Raises UnsupportedByEngine, EngineError."""
        if self._most_rank is None:
            raise UnsupportedByEngine("this TensorRT-LLM was started without adapters, and so without room for one")
        there = self._there.get(name)
        if there is not None:
            if there.folder == folder:
                return
            raise EngineError(f"the adapter {name!r} is loaded from {there.folder} already; unload it first")
        rank = _read_rank(name, Path(folder))
        if rank > self._most_rank:
            raise EngineError(f"{name!r} has rank {rank}; this TensorRT-LLM was started with max_lora_rank={self._most_rank}")
        self._last += 1
        self._there[name] = Adapter(name, folder, rank, self._last)
        self.names_by_number[self._last] = name

    def unload(self, name: str) -> None:
        """Remove an adapter; does nothing if it is not there."""
        self._there.pop(name, None)

    def request_of(self, name: str | None) -> Any:
        """Return TensorRT-LLM's request for an adapter, None for the model itself. Raises RequestInvalid if unknown."""
        if name is None:
            return None
        adapter = self._there.get(name)
        if adapter is None:
            served = ", ".join(self._there) or "none"
            raise RequestInvalid(f"this worker has no adapter {name!r}; it has: {served}", param="model")
        return self._api.LoRARequest(lora_name=name, lora_int_id=adapter.number, lora_path=adapter.folder)
