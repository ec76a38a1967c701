"""Changes an engine's adapters for the worker session, with a time limit and only if the engine can."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.workers.adapter_files.cache import AdapterFolder
from headrace.workers.adapter_files.files import AdapterFiles
from headrace.workers.engine import Engine
from headrace.workers.errors import EngineError, UnsupportedByEngine
from headrace.workers.runtime.watchdog import Watchdog

CHANGE_S = 120.0  # an engine reads the files of an adapter and copies them to its device


class EngineAdapters:
    """Implements `headrace.broker.worker.ports.AdapterPort`."""

    def __init__(
        self,
        engine: Engine,
        watchdog: Watchdog,
        files: AdapterFiles,
        *,
        folders: Mapping[str, AdapterFolder] | None = None,
        timeout_s: float = CHANGE_S,
    ) -> None:
        """While the engine reads an adapter `watchdog` expects no steps: some engines make none then.

        `folders`: those of the engine's start, name → folder. Each stays open until its adapter is unloaded.
        """
        self._engine = engine
        self._watchdog = watchdog
        self._files = files
        self._folders = dict(folders or {})
        self._timeout_s = timeout_s

    async def load(self, name: str, source: str) -> None:
        """Load an adapter from `source`. Raises UnsupportedByEngine, EngineError."""
        if self._engine.capabilities.lora != "dynamic":
            raise UnsupportedByEngine(
                "this worker's engine was started without room for adapters; for vLLM: --engine-arg enable_lora=true"
            )
        folder = await self._files.open(source)
        try:
            await self._change("load_adapter", {"name": name, "source": str(folder.path)})
        except BaseException:
            folder.close()
            raise
        if (before := self._folders.get(name)) is not None:
            before.close()  # the same folder: the engine would have refused another one
        self._folders[name] = folder

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises UnsupportedByEngine, EngineError."""
        await self._change("unload_adapter", {"name": name})
        if (folder := self._folders.pop(name, None)) is not None:
            folder.close()

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
