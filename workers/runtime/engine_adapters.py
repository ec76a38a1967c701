"""Changes an engine's adapters for the worker session, with a time limit and only if the engine can."""

from __future__ import annotations

import asyncio

from headrace.workers.engine import Engine
from headrace.workers.errors import EngineError, UnsupportedByEngine
from headrace.workers.runtime.watchdog import Watchdog

CHANGE_S = 120.0  # an engine reads the files of an adapter and copies them to its device


class EngineAdapters:
    """Implements `headrace.broker.worker.ports.AdapterPort`."""

    def __init__(self, engine: Engine, watchdog: Watchdog, *, timeout_s: float = CHANGE_S) -> None:
        """Meanwhile `watchdog` expects no steps: some engines make none while they read an adapter."""
        self._engine = engine
        self._watchdog = watchdog
        self._timeout_s = timeout_s

    async def load(self, name: str, source: str) -> None:
        """Load an adapter from `source`. Raises UnsupportedByEngine, EngineError."""
        if not source:
            raise EngineError(f"adapter {name!r}: say where it is")
        if self._engine.capabilities.lora != "dynamic":
            raise UnsupportedByEngine(
                "this worker's engine was started without room for adapters; for vLLM: --engine-arg enable_lora=true"
            )
        await self._change("load_adapter", {"name": name, "source": source})

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises UnsupportedByEngine, EngineError."""
        await self._change("unload_adapter", {"name": name})

    async def _change(self, operation: str, args: dict[str, str]) -> None:
        self._watchdog.suspend()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._engine.control(operation, args)
        except TimeoutError:
            name = args["name"]
            raise EngineError(f"{operation} of {name!r} did not end within {self._timeout_s:g} s") from None
        finally:
            self._watchdog.resume()
