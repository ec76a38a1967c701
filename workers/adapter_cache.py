"""Keeps downloaded adapters on the machine's disk: each is downloaded once, by one of the workers that want it.

An entry is a folder named by the digest of what it holds, beside a lock file.  The worker that downloads holds the lock alone;
workers that use the entry share it until their engine has unloaded the adapter.  So an entry in use is never removed, and the
lock of a worker that dies is freed by the kernel.  When the cache has outgrown its limit, the entries go that were used least
recently.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from headrace.workers.blocking import run_in_thread
from headrace.workers.errors import AdapterFilesError

log = structlog.get_logger()

POLL_S = 0.1
ABANDONED_S = 24 * 3600.0  # a half download without its worker


@dataclass(slots=True)
class AdapterFolder:
    """A folder that stays while this is open."""

    path: Path
    _lock: int | None = field(default=None, repr=False)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)  # which frees it
            self._lock = None


def default_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder in the user's cache."""
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace" / "adapters"


class AdapterCache:
    """The adapters below one folder."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        """Remove entries when all together have more than `most_bytes`."""
        self._folder = folder
        self._most_bytes = most_bytes

    async def open(self, key: str, download: Callable[[Path], Awaitable[None]], *, timeout_s: float) -> AdapterFolder:
        """Return the entry `key`, if necessary after `download` has written it into an empty folder.

        Waits while another worker downloads it. Raises AdapterFilesError after `timeout_s`, and what `download` raises.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open(key, download)
        except TimeoutError:
            raise AdapterFilesError(f"the adapter was not there within {timeout_s:g} s") from None
        except OSError as error:
            raise AdapterFilesError(f"the adapter cannot be kept in {self._folder}: {error.strerror}") from None

    async def _open(self, key: str, download: Callable[[Path], Awaitable[None]]) -> AdapterFolder:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = self._folder / key
        with contextlib.ExitStack() as stack:
            lock = os.open(self._lock_file(entry), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            while not _locked(lock, fcntl.LOCK_SH if entry.is_dir() else fcntl.LOCK_EX):
                await asyncio.sleep(POLL_S)
            if not entry.is_dir():
                if not _locked(lock, fcntl.LOCK_EX):  # it was removed just before it was locked
                    return await self._again(key, download)
                await self._fill(entry, download)
                fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(entry)
            stack.pop_all()
        await run_in_thread(self._make_room, name="adapter-cache")
        return AdapterFolder(entry, lock)

    async def _again(self, key: str, download: Callable[[Path], Awaitable[None]]) -> AdapterFolder:
        await asyncio.sleep(POLL_S)
        return await self._open(key, download)

    async def _fill(self, entry: Path, download: Callable[[Path], Awaitable[None]]) -> None:
        part = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".part", dir=self._folder))
        try:
            await download(part)
            os.rename(part, entry)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _make_room(self) -> None:
        """Remove what was used least recently and is not in use, and what dead workers left half."""
        entries: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            if not path.is_dir():
                continue
            used_s = path.stat().st_mtime
            if path.suffix == ".part":
                if time.time() - used_s > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
                continue
            entries.append((used_s, sum(file.stat().st_size for file in path.iterdir()), path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._most_bytes:
                return
            if self._removed(path):
                total -= size
        if total > self._most_bytes:
            log.warning("adapter_cache.full", folder=str(self._folder), bytes=total, most=self._most_bytes, why="all in use")

    def _removed(self, entry: Path) -> bool:
        lock = os.open(self._lock_file(entry), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locked(lock, fcntl.LOCK_EX):
                return False
            shutil.rmtree(entry)
            log.info("adapter_cache.removed", entry=entry.name)
            return True
        finally:
            os.close(lock)

    def _lock_file(self, entry: Path) -> Path:
        return entry.with_name(f"{entry.name}.lock")  # never removed: another process may just be opening it


def _locked(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
