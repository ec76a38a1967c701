"""Loads a worker's LoRA adapters: those of its start (`adapters={"name": "folder", …}`), and those added while it serves.

Clients see each adapter as a model of its own. Adapters are loaded before they are announced, so that one that does not fit the
model is found then, and no request waits for a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.workers.errors import EngineError, EngineStartFailed, UnsupportedByEngine
from headrace.workers.lora_adapters import read_config, unknown_adapter

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM supports
_AGAIN = "\x1f"  # separates an adapter's name from the number of its earlier loads; no name has it


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `number` is vLLM's id, unique in an engine, from 1. `turn`: earlier loads of this name."""

    name: str
    folder: str
    rank: int
    number: int
    turn: int = 0

    def request(self) -> Any:
        """Make vLLM's `LoRARequest`.

        vLLM knows cached blocks by the adapter's name and keeps them when it is unloaded: the next one of that name must not
        find them.
        """
        from vllm.lora.request import LoRARequest

        name = f"{self.name}{_AGAIN}{self.turn}" if self.turn else self.name
        return LoRARequest(lora_name=name, lora_int_id=self.number, lora_path=self.folder)


def public_name(name: str | None) -> str | None:
    """Return the clients' name of the adapter that vLLM knows by `name`."""
    return None if name is None else name.partition(_AGAIN)[0]


def read_adapter(name: str, folder: str, number: int, turn: int = 0) -> Adapter:
    """Read an adapter from its folder. Raises EngineError if there is none, or one of a rank that vLLM does not support."""
    return Adapter(name, folder, read_config(name, folder, most_rank=_RANKS[-1]).rank, number, turn)


def lora_args(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Return vLLM's settings for these adapters: room for all at once, of the largest rank."""
    if not adapters:
        return {}
    most = max(adapter.rank for adapter in adapters.values())
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": next(rank for rank in _RANKS if rank >= most)}


async def load_adapters(llm: Any, adapters: Mapping[str, Adapter]) -> None:
    """Load the adapters into the engine. Raises EngineStartFailed for the first that the engine refuses."""
    for adapter in adapters.values():
        try:
            await _add(llm, adapter)
        except EngineError as error:
            raise EngineStartFailed(str(error)) from error


async def _add(llm: Any, adapter: Adapter) -> None:
    try:
        loaded = await llm.add_lora(adapter.request())
    except Exception as error:
        raise EngineError(f"vLLM cannot load the adapter {adapter.name!r} from {adapter.folder}: {error}") from error
    if not loaded:
        raise EngineError(f"vLLM did not load the adapter {adapter.name!r} from {adapter.folder}")


class Adapters:
    """The adapters of a running engine."""

    def __init__(self, llm: Any, started_with: Mapping[str, Adapter], *, most_rank: int | None) -> None:
        """`most_rank`: None for an engine that was started without room for adapters."""
        self._llm = llm
        self._there = dict(started_with)
        self._most_rank = most_rank
        self._last = len(self._there)
        self._turns = dict.fromkeys(self._there, 1)  # how often each name was loaded

    @property
    def changeable(self) -> bool:
        """Return whether the engine has room for adapters."""
        return self._most_rank is not None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._there)

    async def do(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one of `ADAPTER_OPERATIONS`. Raises UnsupportedByEngine, EngineError."""
        if not self.changeable:
            raise UnsupportedByEngine(f"{op}: this vLLM was started without enable_lora")
        if op == "load_adapter":
            await self.load(args["name"], args["source"])
        else:
            await self.unload(args["name"])
        return {}

    async def load(self, name: str, folder: str) -> None:
        """Load an adapter; does nothing if it is loaded from this folder. Raises UnsupportedByEngine, EngineError."""
        if self._most_rank is None:
            raise UnsupportedByEngine("this vLLM was started without enable_lora")
        there = self._there.get(name)
        if there is not None and there.folder == folder:
            return
        if there is not None:
            raise EngineError(f"the adapter {name!r} is loaded from {there.folder} already; unload it first")
        adapter = read_adapter(name, folder, self._last + 1, self._turns.get(name, 0))
        if adapter.rank > self._most_rank:
            raise EngineError(f"{name!r} has rank {adapter.rank}; this vLLM was started with max_lora_rank={self._most_rank}")
        self._last += 1
        await _add(self._llm, adapter)
        self._turns[name] = adapter.turn + 1
        self._there[name] = adapter

    async def unload(self, name: str) -> None:
        """Unload an adapter; does nothing if it is not loaded. Raises EngineError."""
        adapter = self._there.pop(name, None)
        if adapter is None:
            return
        try:
            await self._llm.remove_lora(adapter.number)  # The result is false if vLLM had dropped it already.
        except Exception as error:
            raise EngineError(f"vLLM cannot unload the adapter {name!r}: {error}") from error

    def request_of(self, name: str | None) -> Any:
        """Return vLLM's request for an adapter, None for the model itself. Raises RequestInvalid for an unknown adapter."""
        if name is None:
            return None
        adapter = self._there.get(name)
        if adapter is None:
            raise unknown_adapter(name, self._there)
        return adapter.request()
