"""From the source of an adapter to a checked folder: what is allowed, what is too large, and what was pushed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.workers.adapter_files.archive import pack
from headrace.workers.adapter_files.cache import AdapterCache
from headrace.workers.adapter_files.files import AdapterFiles, AdapterLimits, open_engine_adapters
from headrace.workers.adapter_files.source import AllowedSources
from headrace.workers.errors import AdapterFilesError, EngineStartFailed
from tests.support.adapter_folders import adapter_folder
from tests.support.memory_store import MemoryClock, MemoryObjects

MIB = 1024 * 1024


class Bench:
    """Files over a store in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryObjects(MemoryClock())
        self.cache = AdapterCache(folder / "cache", most_bytes=MIB)

    def files(self, *rules: str, most_bytes: int = MIB) -> AdapterFiles:
        limits = AdapterLimits(allowed=AllowedSources(rules or ("folder", "store")), most_bytes=most_bytes, timeout_s=10)
        return AdapterFiles(limits, self.cache, self.store)

    async def push(self, name: str, **files: bytes) -> None:
        path = self.folder / "pushed.tar"
        with path.open("wb") as out:
            pack(adapter_folder(self.folder / "pushed", **files), out)
        await self.store.put(name, path.read_bytes())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def refused(files: AdapterFiles, source: str) -> str:
    with pytest.raises(AdapterFilesError) as told:
        await files.open(source)
    return str(told.value)


async def test_a_path_that_no_folder_can_have_is_refused(bench: Bench) -> None:
    assert "is no path of a folder" in await refused(bench.files(), "/" + "x" * 5000)


async def test_what_was_pushed_is_a_folder_and_the_same_one_the_next_time(bench: Bench) -> None:
    await bench.push("sql")
    first, again = await bench.files().open("store://sql"), await bench.files().open("store://sql")
    assert first.path == again.path
    assert sorted(path.name for path in first.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    await bench.push("sql", config=b'{"peft_type": "LORA", "r": 4}')
    replaced = await bench.files().open("store://sql")
    assert replaced.path != first.path
    for opened in (first, again, replaced):
        opened.close()


async def test_what_was_pushed_by_another_tool_is_checked_before_an_engine_sees_it(bench: Bench) -> None:
    await bench.push("sql", weights=b"\x80\x04]\x94.")
    assert "is no safetensors file" in await refused(bench.files(), "store://sql")
    assert not list((bench.folder / "cache").glob("*.part"))
    await bench.store.put("sql", b"no archive")
    assert "the archive cannot be read" in await refused(bench.files(), "store://sql")


async def test_limits_and_rules_come_first(bench: Bench) -> None:
    await bench.push("sql")
    assert "more than 100 (worker.adapter_max_bytes)" in await refused(bench.files(most_bytes=100), "store://sql")
    assert "allows: folder" in await refused(bench.files("folder"), "store://sql")
    assert "store://other cannot be read" in await refused(bench.files(), "store://other")


async def test_a_folder_is_taken_where_it_is_and_checked_if_it_has_an_adapter_of_peft(bench: Bench) -> None:
    folder = adapter_folder(bench.folder / "a")
    assert (await bench.files().open(str(folder))).path == folder
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "may hold code" in await refused(bench.files(), str(folder))
    assert (await bench.files().open("/of/another/engine")).path == Path("/of/another/engine")


async def test_an_engine_is_started_with_folders_in_place_of_sources(bench: Bench) -> None:
    await bench.push("sql")
    args, folders = await open_engine_adapters(bench.files(), {"adapters": {"sql": "store://sql", "fr": "/models/fr"}, "x": 1})
    assert args == {"adapters": {"sql": str(folders["sql"].path), "fr": "/models/fr"}, "x": 1}
    folders["sql"].close()
    assert await open_engine_adapters(bench.files(), {"adapters": ["sql"]}) == ({"adapters": ["sql"]}, {})
    with pytest.raises(EngineStartFailed, match="adapters: adapters from hf://org/sql are not allowed"):
        await open_engine_adapters(bench.files(), {"adapters": {"sql": "store://sql", "fr": "hf://org/sql"}})
