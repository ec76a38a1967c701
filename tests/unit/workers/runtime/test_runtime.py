"""The load of a rank is what the worker knows of its runs and what the engine tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from headrace.broker.messages.events import RankLoad
from headrace.workers.adapter_cache import AdapterFolder
from headrace.workers.engine import Capabilities, Load
from headrace.workers.errors import AdapterFilesError, EngineError, UnsupportedByEngine
from headrace.workers.runtime.runtime import EngineAdapters, rank_loads

RANKS = [RankLoad(running=2, batch=1), RankLoad(running=1)]


def test_what_the_engine_tells_of_a_rank_is_added_to_what_runs_there() -> None:
    told = (Load(running=9, blocks_used=5, blocks_total=50, queued_prefill_tokens=10), Load(waiting=3, step_decodes=4))
    first, second = rank_loads(RANKS, Load(ranks=told), {1: 7})
    assert (first.running, first.batch, first.blocks_used, first.blocks_total) == (2, 1, 5, 50)
    assert (first.queued_prefill_tokens, second.queued_prefill_tokens) == (10, 7)
    assert (second.running, second.waiting, second.step_decodes) == (1, 3, 4)


def test_an_engine_that_tells_nothing_of_ranks_shares_out_evenly() -> None:
    loads = rank_loads(RANKS, Load(blocks_total=100, blocks_used=40, queued_prefill_tokens=600), {0: 8})
    assert [(load.blocks_total, load.blocks_used, load.queued_prefill_tokens) for load in loads] == [
        (50, 20, 308),
        (50, 20, 300),
    ]


def test_a_worker_with_one_rank_reports_none() -> None:
    assert rank_loads([], Load(blocks_total=100), {}) == []


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
