"""Reads the LoRA adapters that an engine's settings name (`adapters={"name": "folder", …}`), in the format of PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid

ADAPTERS_ARG = "adapters"
ADAPTER_OPERATIONS = frozenset({"load_adapter", "unload_adapter"})
CONFIG = "adapter_config.json"

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The part of an adapter's configuration that decides what room an engine needs for it."""

    rank: int
    modules: tuple[str, ...]


def adapters_of(config: EngineConfig, read: Callable[[str, str, int], A]) -> dict[str, A]:
    """Read the adapters of the engine's settings. Raises EngineStartFailed with the reason.

    `read` makes an engine's own record of an adapter, from its name, its folder and its number, from 1.
    """
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
            found[name] = read(name, folder, number)
        except EngineError as error:
            raise EngineStartFailed(f"{ADAPTERS_ARG}: {error}") from None
    return found


def read_config(name: str, folder: str, *, most_rank: int | None = None) -> LoraConfig:
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
    return LoraConfig(rank, (modules,) if isinstance(modules, str) else tuple(modules))


def unknown_adapter(name: str, served: Iterable[str]) -> RequestInvalid:
    """Return the refusal of a request for an adapter that this worker does not have."""
    return RequestInvalid(f"this worker has no adapter {name!r}; it has: {', '.join(served) or 'none'}", param="model")
