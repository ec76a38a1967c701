"""Keeps blocks as files of a folder, in bounded space: the least recently used make room.

Several engines of a machine may name one folder. Each takes a part of it for itself, with a lock that ends with its process,
and finds what an earlier engine has left there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from headrace.workers.vllm.tiers.block_store import BlockAbsent, StoreFailed

T = TypeVar("T")

_PARTS = 64
_THREADS = 4
_TEMPORARY = ".new"


class FolderStore:
    """The files of one engine. `max_bytes` bounds the sum of their lengths."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Take a part of the folder and read what is there. Raises OSError, and StoreFailed where all parts are in use."""
        self._max_bytes = max_bytes
        self._root, self._lock = _take_part(folder)
        self._sizes: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._bytes = 0
        self._writing = 0  # bytes of the files that are being written
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-disk")
        for name, size in _found(self._root):
            self._sizes[name] = size
            self._bytes += size
        self._evict()

    @property
    def used_bytes(self) -> int:
        """Return the sum of the lengths of the files."""
        return self._bytes

    async def held(self, names: Sequence[str]) -> Collection[str]:
        return {name for name in names if name in self._sizes}

    async def read(self, name: str) -> bytes:
        if name not in self._sizes:
            raise BlockAbsent(name)
        self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(self._path(name))  # so that the next engine knows what was used last
        try:
            return await self._in_thread(self._path(name).read_bytes)
        except FileNotFoundError:  # removed by a person
            self._forget(name)
            raise BlockAbsent(name) from None

    async def write(self, name: str, record: bytes) -> Sequence[str]:
        size = len(record)
        if size > self._max_bytes:
            raise StoreFailed(f"a block of {size} bytes is larger than the tier, which has {self._max_bytes}")
        self._forget(name)
        self._writing += size
        try:
            gone = self._evict()
            await self._in_thread(partial(_write, self._path(name), record))
        finally:
            self._writing -= size
        self._sizes[name] = size
        self._bytes += size
        return gone

    async def remove(self, name: str) -> None:
        self._forget(name)
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        os.close(self._lock)

    def _path(self, name: str) -> Path:
        return self._root / name

    def _forget(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)

    def _evict(self) -> list[str]:
        gone = []
        while self._sizes and self._bytes + self._writing > self._max_bytes:
            name, size = self._sizes.popitem(last=False)
            self._bytes -= size
            gone.append(name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))
        return gone

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except FileNotFoundError:
            raise
        except (OSError, RuntimeError) as error:  # the latter of a pool that was shut down
            raise StoreFailed(str(error)) from error


def _write(path: Path, record: bytes) -> None:
    """Write a file that is there whole or not at all, readable by this user alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(path.name + _TEMPORARY)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(record)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _take_part(folder: Path) -> tuple[Path, int]:
    """Return the first part of the folder that no other engine uses, and the descriptor that holds its lock."""
    for number in range(_PARTS):
        part = folder / f"engine-{number}"
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(part / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            continue
        return part, lock
    raise StoreFailed(f"{_PARTS} engines use {folder} already")


def _found(root: Path) -> list[tuple[str, int]]:
    """Return names and lengths of the files below, those first that were not used for longest. Removes half-written ones."""
    found: list[tuple[float, str, int]] = []
    for path in root.rglob("*"):
        if path.name == ".lock" or not path.is_file():
            continue
        if path.name.endswith(_TEMPORARY):
            path.unlink(missing_ok=True)
            continue
        state = path.stat()
        found.append((state.st_mtime, str(path.relative_to(root)), state.st_size))
    return [(name, size) for _, name, size in sorted(found)]
