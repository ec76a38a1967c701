"""Blocks in a folder: bounded, found again by the next engine, and never taken half-written."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.workers.vllm.tiers import folder_store
from headrace.workers.vllm.tiers.block_store import BlockAbsent, StoreFailed
from headrace.workers.vllm.tiers.folder_store import FolderStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FolderStore]:
    made = FolderStore(tmp_path, 1000)
    yield made
    await made.close()


def files(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


async def test_what_was_written_is_held_and_read(store: FolderStore) -> None:
    assert await store.write("ns/a", b"first") == []
    assert await store.held(["ns/a", "ns/b"]) == {"ns/a"}
    assert await store.read("ns/a") == b"first"
    with pytest.raises(BlockAbsent):
        await store.read("ns/b")


async def test_the_least_recently_used_make_room(store: FolderStore, tmp_path: Path) -> None:
    for name in "abcd":
        assert await store.write(f"ns/{name}", b"x" * 250) == []
    await store.read("ns/a")
    assert await store.write("ns/e", b"x" * 400) == ["ns/b", "ns/c"]
    assert await store.held([f"ns/{name}" for name in "abcde"]) == {"ns/a", "ns/d", "ns/e"}
    assert store.used_bytes == sum(files(tmp_path).values()) == 900


async def test_a_block_that_is_written_again_counts_once(store: FolderStore, tmp_path: Path) -> None:
    for size in (100, 300, 200):
        await store.write("ns/a", b"x" * size)
    assert store.used_bytes == 200
    assert list(files(tmp_path).values()) == [200]


async def test_a_block_that_is_larger_than_the_tier_is_refused(store: FolderStore, tmp_path: Path) -> None:
    await store.write("ns/a", b"x")
    with pytest.raises(StoreFailed, match="a block of 1001 bytes is larger than the tier, which has 1000"):
        await store.write("ns/b", b"x" * 1001)
    assert await store.held(["ns/a"]) == {"ns/a"}


async def test_the_next_engine_finds_the_blocks_in_the_order_of_their_use(tmp_path: Path) -> None:
    first = FolderStore(tmp_path, 1000)
    for number, name in enumerate("abc"):
        await first.write(f"ns/{name}", b"x" * 300)
        os.utime(tmp_path / "engine-0" / "ns" / name, (number, number))
    await first.read("ns/a")
    await first.close()
    second = FolderStore(tmp_path, 1000)
    assert await second.write("ns/d", b"x" * 300) == ["ns/b"]
    assert await second.read("ns/a") == b"x" * 300
    await second.close()


async def test_a_smaller_tier_drops_what_it_has_no_room_for(tmp_path: Path) -> None:
    first = FolderStore(tmp_path, 1000)
    for name in "abc":
        await first.write(f"ns/{name}", b"x" * 300)
    await first.close()
    second = FolderStore(tmp_path, 400)
    assert second.used_bytes == sum(files(tmp_path).values()) == 300
    await second.close()


async def test_what_a_killed_engine_had_half_written_is_removed(tmp_path: Path) -> None:
    half = tmp_path / "engine-0" / "ns" / "a.new"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x" * 10)
    store = FolderStore(tmp_path, 1000)
    assert not half.exists()
    assert store.used_bytes == 0
    await store.close()


async def test_engines_that_name_one_folder_have_a_part_each(store: FolderStore, tmp_path: Path) -> None:
    other = FolderStore(tmp_path, 1000)
    await store.write("ns/a", b"mine")
    await other.write("ns/a", b"other")
    assert await store.read("ns/a") == b"mine"
    await other.close()


async def test_more_engines_than_parts_are_refused(store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_store, "_PARTS", 1)
    with pytest.raises(StoreFailed, match=f"1 engines use {tmp_path} already"):
        FolderStore(tmp_path, 1000)


async def test_a_file_that_a_person_has_removed_is_absent(store: FolderStore, tmp_path: Path) -> None:
    await store.write("ns/a", b"x")
    (tmp_path / "engine-0" / "ns" / "a").unlink()
    with pytest.raises(BlockAbsent):
        await store.read("ns/a")
    assert await store.held(["ns/a"]) == set()
    assert store.used_bytes == 0


async def test_a_disk_that_refuses_is_a_failed_store_and_costs_no_room(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "engine-0" / "ns").write_bytes(b"a file in the place of a folder")
    with pytest.raises(StoreFailed):
        await store.write("ns/a", b"x" * 900)
    assert await store.held(["ns/a"]) == set()
    assert await store.write("b", b"x" * 900) == []


async def test_others_of_the_machine_cannot_read_blocks(store: FolderStore, tmp_path: Path) -> None:
    await store.write("ns/a", b"x")
    for path in (tmp_path / "engine-0", tmp_path / "engine-0" / "ns"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "engine-0" / "ns" / "a").stat().st_mode & 0o777 == 0o600
