"""Adapters of an engine: what it is told, and how long their files stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from headrace.workers.adapter_files.cache import AdapterFolder
from headrace.workers.engine import Capabilities
from headrace.workers.errors import AdapterFilesError, EngineError, UnsupportedByEngine
from headrace.workers.runtime.engine_adapters import EngineAdapters


class Folder(AdapterFolder):
    """Notes that it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Bench:
    """An engine that takes adapters, and files that are folders named by their source."""

    def __init__(self, *, lora: Literal["none", "static", "dynamic"] = "dynamic") -> None:
        self.capabilities = Capabilities(lora=lora)
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.folders: list[Folder] = []
        self.error: Exception | None = None
        self.held = 0

    async def control(self, operation: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self.held, "no steps are expected meanwhile"
        self.told.append((operation, args))
        if self.error is not None:
            raise self.error
        return {}

    async def open(self, source: str) -> AdapterFolder:
        if source == "nothing":
            raise AdapterFilesError("there is nothing")
        self.folders.append(Folder(Path("/cache") / source))
        return self.folders[-1]

    def suspend(self) -> None:
        self.held += 1

    def resume(self) -> None:
        self.held -= 1

    def adapters(self, **folders: Folder) -> EngineAdapters:
        played: Any = self  # the engine, its watchdog and the files
        return EngineAdapters(played, played, played, folders=folders, timeout_s=5)


async def test_an_engine_is_given_the_folder_which_stays_until_the_adapter_goes() -> None:
    bench = Bench()
    adapters = bench.adapters()
    await adapters.load("sql", "a")
    assert bench.told == [("load_adapter", {"name": "sql", "source": "/cache/a"})]
    assert not bench.folders[0].closed
    await adapters.load("sql", "a")  # again: the first hold on the same folder is let go
    assert [folder.closed for folder in bench.folders] == [True, False]
    await adapters.unload("sql")
    assert [folder.closed for folder in bench.folders] == [True, True]
    assert bench.held == 0


async def test_a_folder_that_the_engine_refuses_is_let_go() -> None:
    bench = Bench()
    bench.error = EngineError("its rank is too large")
    with pytest.raises(EngineError, match="rank"):
        await bench.adapters().load("sql", "a")
    assert bench.folders[0].closed
    assert bench.held == 0


async def test_files_that_are_not_there_never_reach_the_engine() -> None:
    bench = Bench()
    with pytest.raises(AdapterFilesError):
        await bench.adapters().load("sql", "nothing")
    assert not bench.told


async def test_an_engine_without_room_downloads_nothing() -> None:
    bench = Bench(lora="static")
    with pytest.raises(UnsupportedByEngine, match="without room"):
        await bench.adapters().load("sql", "a")
    assert not bench.folders


async def test_the_folder_of_an_adapter_of_the_start_is_let_go_with_it() -> None:
    bench, folder = Bench(), Folder(Path("/cache/a"))
    await bench.adapters(sql=folder).unload("sql")
    assert folder.closed
