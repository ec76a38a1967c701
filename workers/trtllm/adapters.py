"""Knows a worker's LoRA adapters: those of its start (`adapters={"name": "folder", …}`), and those added while it serves.

TensorRT-LLM has no call that loads or unloads an adapter: a request names it with a number and a folder, its weights are read
then, and the least recently used ones leave its caches. So an adapter is added by checking its folder, and removed by no longer
naming it; each load gets a new number, because weights are cached by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.workers.errors import EngineError, UnsupportedByEngine
from headrace.workers.lora_adapters import read_config, unknown_adapter

LEAST_ROOM = 4  # adapters on the GPU; as many again in host memory


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `number` is the engine's id of it, from 1."""

    name: str
    folder: str
    rank: int
    number: int


def read_adapter(name: str, folder: str, number: int) -> Adapter:
    """Read an adapter from its folder. Raises EngineError if there is none."""
    return Adapter(name, folder, read_config(name, folder).rank, number)


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
        adapter = read_adapter(name, folder, self._last + 1)
        if adapter.rank > self._most_rank:
            most = self._most_rank
            raise EngineError(f"{name!r} has rank {adapter.rank}; this TensorRT-LLM was started with max_lora_rank={most}")
        self._last += 1
        self._there[name] = adapter
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
            raise unknown_adapter(name, self._there)
        return self._api.LoRARequest(lora_name=name, lora_int_id=adapter.number, lora_path=adapter.folder)
