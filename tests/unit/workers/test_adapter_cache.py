"""The cache of downloaded adapters: one download for all workers, room made of what no engine uses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.workers.adapter_cache import ABANDONED_S, AdapterCache, default_cache
from headrace.workers.errors import AdapterFilesError

KIB = 1024


class Downloads:
    """Writes a file of a KiB, and counts how often."""

    def __init__(self, *, takes_s: float = 0.0) -> None:
        self.count = 0
        self._takes_s = takes_s

    async def __call__(self, folder: Path) -> None:
        self.count += 1
        await asyncio.sleep(self._takes_s)
        (folder / "file").write_bytes(bytes(KIB))


async def test_what_is_wanted_by_many_at_once_is_downloaded_once(tmp_path: Path) -> None:
    download = Downloads(takes_s=0.3)
    caches = [AdapterCache(tmp_path, most_bytes=KIB) for _ in range(4)]  # as of four workers
    opened = await asyncio.gather(*(cache.open("k", download, timeout_s=10) for cache in caches))
    assert download.count == 1
    assert {one.path for one in opened} == {tmp_path / "k"}
    for one in opened:
        one.close()


async def test_a_download_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, most_bytes=KIB)

    async def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise AdapterFilesError("no such thing")

    with pytest.raises(AdapterFilesError, match="no such thing"):
        await cache.open("k", fail, timeout_s=5)
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]
    (await cache.open("k", Downloads(), timeout_s=5)).close()


async def test_a_download_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(AdapterFilesError, match=r"not there within 0\.2 s"):
        await AdapterCache(tmp_path, most_bytes=KIB).open("k", Downloads(takes_s=60), timeout_s=0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]


async def test_room_is_made_of_the_least_recently_used_that_is_not_in_use(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, most_bytes=3 * KIB)
    opened = {}
    for age, key in ((30, "old-in-use"), (20, "old"), (10, "young")):
        opened[key] = await cache.open(key, Downloads(), timeout_s=5)
        os.utime(tmp_path / key, (time.time() - age,) * 2)
    for key in ("old", "young"):
        opened[key].close()
    (await cache.open("new", Downloads(), timeout_s=5)).close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["new", "old-in-use", "young"]
    opened["old-in-use"].close()
    (await cache.open("newer", Downloads(), timeout_s=5)).close()
    assert not (tmp_path / "old-in-use").exists()


async def test_a_use_makes_an_entry_young(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, most_bytes=2 * KIB)
    for age, key in ((30, "a"), (20, "b")):
        (await cache.open(key, Downloads(), timeout_s=5)).close()
        os.utime(tmp_path / key, (time.time() - age,) * 2)
    (await cache.open("a", Downloads(), timeout_s=5)).close()
    (await cache.open("c", Downloads(), timeout_s=5)).close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["a", "c"]


async def test_half_downloads_of_dead_workers_go_after_a_day(tmp_path: Path) -> None:
    for name, age in (("k.x.part", ABANDONED_S + 60), ("k.y.part", 60.0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (await AdapterCache(tmp_path, most_bytes=KIB).open("k", Downloads(), timeout_s=5)).close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["k", "k.y.part"]


async def test_the_lock_of_a_worker_that_was_killed_is_free(tmp_path: Path) -> None:
    script = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "k.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        cache = AdapterCache(tmp_path, most_bytes=KIB)
        with pytest.raises(AdapterFilesError, match="within"):
            await cache.open("k", Downloads(), timeout_s=0.3)
        holder.kill()
    (await cache.open("k", Downloads(), timeout_s=5)).close()


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(AdapterFilesError, match=r"cannot be kept in .*file"):
        await AdapterCache(tmp_path / "file", most_bytes=KIB).open("k", Downloads(), timeout_s=5)


def test_the_cache_is_the_user_s() -> None:
    assert default_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/headrace/adapters")
    assert default_cache({}) == Path("~/.cache/headrace/adapters").expanduser()
