"""The LoRA adapters of an engine: those of its start (`adapters={"name": "folder", …}`), and those added while it serves.

Clients see each adapter as a model of its own. Files are in the format of PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine

ADAPTERS_ARG = "adapters"
CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter; its rank and the modules that it changes decide what room an engine needs for it."""

    name: str
    folder: str
    rank: int = 0
    modules: tuple[str, ...] = ()
    number: int = 0  # of its load in this engine, from 1
    turn: int = 0  # earlier loads of this name


def read_adapter(name: str, folder: str, *, number: int = 0, turn: int = 0, most_rank: int | None = None) -> Adapter:
    """Read an adapter's configuration. Raises EngineError if the folder has no adapter, or one of an impossible rank."""
    path = Path(folder) / CONFIG
    try:
        about = json.loads(path.read_bytes())
        rank, modules = about["r"], about.get("target_modules") or ()
    except OSError as error:
        raise EngineError(f"{name!r} is no adapter: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path} is no adapter's configuration: {error!r}") from None
    if not isinstance(rank, int) or rank < 1 or (most_rank is not None and rank > most_rank):
        possible = "it must be 1 or more" if most_rank is None else f"1 to {most_rank} are possible"
        raise EngineError(f"{name!r} has rank {rank!r}; {possible}")
    return Adapter(name, folder, rank, (modules,) if isinstance(modules, str) else tuple(modules), number, turn)


def adapters_of(config: EngineConfig, *, most_rank: int | None = None) -> dict[str, Adapter]:
    """Read the adapters of the engine's settings, numbered from 1. Raises EngineStartFailed with the reason."""
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
            found[name] = read_adapter(name, folder, number=number, most_rank=most_rank)
        except EngineError as error:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {error}") from None
    return found


def unknown_adapter(name: str, served: Iterable[str]) -> RequestInvalid:
    return RequestInvalid(f"this worker has no adapter {name!r}; it has: {', '.join(served) or 'none'}", param="model")


async def _nothing(adapter: Adapter) -> None:
    """Do nothing: the engine reads an adapter with the first request that names it."""


class Adapters:
    """The adapters of a running engine, by name."""

    def __init__(
        self,
        engine: str,
        started_with: Mapping[str, Adapter],
        *,
        room: str | None,
        most_rank: int | None = None,
        add: Callable[[Adapter], Awaitable[None]] = _nothing,
        remove: Callable[[Adapter], Awaitable[None]] = _nothing,
    ) -> None:
        """`most_rank`: the rank that the engine has room for, None = it says so itself. `add` and `remove` raise EngineError.

        `room`: the setting without which the engine has no room for adapters, None = it was started with it.
        """
        self._engine = engine
        self._room = room
        self._most_rank = most_rank
        self._add, self._remove = add, remove
        self._there = dict(started_with)
        self._last = len(self._there)
        self._turns = dict.fromkeys(self._there, 1)  # how often each name was loaded
        self.names_by_number = {adapter.number: name for name, adapter in self._there.items()}  # of unloaded ones too

    @property
    def changeable(self) -> bool:
        return self._room is None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._there)

    def of(self, name: str | None) -> Adapter | None:
        """Return the adapter of a request, None for the model itself. Raises RequestInvalid for an unknown one."""
        if name is not None and name not in self._there:
            raise unknown_adapter(name, self._there)
        return None if name is None else self._there[name]

    async def do(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one of `ADAPTER_OPERATIONS`. Raises UnsupportedByEngine, EngineError."""
        if self._room is not None:
            raise UnsupportedByEngine(f"{op}: this {self._engine} was started without {self._room}")
        if op == "load_adapter":
            await self.load(args["name"], args["source"])
        elif (adapter := self._there.pop(args["name"], None)) is not None:
            await self._remove(adapter)
        return {}

    async def load(self, name: str, folder: str) -> None:
        """Load an adapter, unless it is loaded from this folder. Raises EngineError."""
        there = self._there.get(name)
        if there is not None and there.folder == folder:
            return
        if there is not None:
            raise EngineError(f"the adapter {name!r} is loaded from {there.folder or 'its start on'} already; unload it first")
        adapter = read_adapter(name, folder, number=self._last + 1, turn=self._turns.get(name, 0))
        if self._most_rank is not None and adapter.rank > self._most_rank:
            most = f"max_lora_rank={self._most_rank}"
            raise EngineError(f"{name!r} has rank {adapter.rank}; this {self._engine} was started with {most}")
        self._last += 1
        await self._add(adapter)
        self._turns[name] = adapter.turn + 1
        self._there[name] = adapter
        self.names_by_number[adapter.number] = name
