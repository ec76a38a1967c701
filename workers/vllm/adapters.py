"""Adapters (LoRA) that a worker is started with: `adapters={"name": "folder", …}`. Each is a model of its own to clients.

They are loaded at the start, so that one that does not fit the model is known then, and no request waits for a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.engine import EngineConfig
from workers.errors import EngineStartFailed, RequestInvalid

ADAPTERS_ARG = "adapters"
CONFIG = "adapter_config.json"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM makes room for


@dataclass(frozen=True, slots=True)
class Adapter:
    """`number` is vLLM's name for it, unique in one engine, from 1."""

    name: str
    folder: str
    rank: int
    number: int

    def request(self) -> Any:
        """vLLM's `LoRARequest`."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=self.name, lora_int_id=self.number, lora_path=self.folder)


def adapters_of(config: EngineConfig) -> dict[str, Adapter]:
    """Raises EngineStartFailed naming what is wrong."""
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
        found[name] = Adapter(name, folder, _rank(name, Path(folder)), number)
    return found


def _rank(name: str, folder: Path) -> int:
    path = folder / CONFIG
    try:
        rank = json.loads(path.read_bytes())["r"]
    except OSError as error:
        raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} is no adapter: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise EngineStartFailed(f"{ADAPTERS_ARG}: {path} is no adapter's configuration: {error!r}") from None
    if not isinstance(rank, int) or not 1 <= rank <= _RANKS[-1]:
        raise EngineStartFailed(f"{ADAPTERS_ARG}: {name!r} has rank {rank!r}; 1 to {_RANKS[-1]} are possible")
    return rank


def lora_args(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """vLLM's settings for them: room for all at once, of the largest rank."""
    if not adapters:
        return {}
    most = max(adapter.rank for adapter in adapters.values())
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": next(rank for rank in _RANKS if rank >= most)}


async def load_adapters(llm: Any, adapters: Mapping[str, Adapter]) -> None:
    """Raises EngineStartFailed for the first that the engine does not take."""
    for adapter in adapters.values():
        try:
            loaded = await llm.add_lora(adapter.request())
        except Exception as error:
            raise EngineStartFailed(f"vLLM cannot load the adapter {adapter.name!r} from {adapter.folder}: {error}") from error
        if not loaded:
            raise EngineStartFailed(f"vLLM did not load the adapter {adapter.name!r} from {adapter.folder}")


def request_of(adapters: Mapping[str, Adapter], name: str | None) -> Any:
    """What a sequence hands to vLLM: None for the model itself. Raises RequestInvalid for an adapter that is not here."""
    if name is None:
        return None
    adapter = adapters.get(name)
    if adapter is None:
        served = ", ".join(adapters) or "none"
        raise RequestInvalid(f"this worker has no adapter {name!r}; it has: {served}", param="model")
    return adapter.request()
