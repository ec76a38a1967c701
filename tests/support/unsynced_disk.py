"""A disk that loses at a power cut what was not synced: a file system over FUSE that keeps unsynced bytes in its memory.

Names are durable at once: what is created, renamed or deleted stays so. Bytes and lengths are durable once they are synced. A
rename syncs its file first, as ext4 does, unless the disk is strict.

    python -m tests.support.unsynced_disk FOLDER MOUNT [--strict]

serves at MOUNT until its standard input ends; FOLDER has what a cut leaves.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

_MOUNT_S = 20.0
_HIDDEN = ".fuse_hidden*"  # the names under which libfuse keeps open files that were deleted


def missing() -> str:
    """Return what this machine lacks, "" for nothing."""
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    if ctypes.util.find_library("fuse3") is None or shutil.which("fusermount3") is None:
        return "there is no fuse3: make fuse installs it"
    return "" if importlib.util.find_spec("mfusepy") else "there is no mfusepy"


class Unmountable(OSError):
    """This machine lets nobody mount a file system."""


class UnsyncedDisk:
    """Mounted at `mount` between `start` and `cut`, as often as one likes."""

    def __init__(self, mount: Path, *, strict: bool = False) -> None:
        self.mount = mount
        self.kept = mount.with_name(f"{mount.name}.kept")  # what a cut leaves
        self._strict = strict
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises Unmountable."""
        for folder in (self.mount, self.kept):
            folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", __name__, self.kept, self.mount, *["--strict"] * self._strict]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "FUSE_LIBRARY_NAME": "fuse3"},
            )
        deadline = time.monotonic() + _MOUNT_S
        while not self.mount.is_mount():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._log.read_text()
                self.cut()
                refused = "not permitted" in said or "Permission denied" in said
                raise (Unmountable if refused else OSError)(f"the disk could not be mounted: {said.strip()}")
            time.sleep(0.02)

    def cut(self) -> None:
        """Forget what was not synced. Kill those who use the disk before."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            subprocess.run(["fusermount3", "-uzq", self.mount], check=False, stderr=subprocess.DEVNULL)
            for path in self.kept.rglob(_HIDDEN):
                path.unlink()

    @property
    def _log(self) -> Path:
        return self.mount.with_name(f"{self.mount.name}.log")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.cut()


class _File:
    """An open file, or one with unsynced bytes. `content` is all of it once it was written to."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR)
        self.ino = os.fstat(self.fd).st_ino
        self.content: bytearray | None = None
        self.first, self.last = sys.maxsize, 0  # unsynced bytes lie between these
        self.dirty = False
        self.handles = 0

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self.fd, size, offset) if self.content is None else bytes(self.content[offset : offset + size])

    def write(self, data: bytes, offset: int) -> None:
        content = self._loaded()
        begin = min(offset, len(content))  # a gap is zeros
        content[begin : offset + len(data)] = bytes(offset - begin) + data
        self.first, self.last, self.dirty = min(self.first, begin), max(self.last, offset + len(data)), True

    def truncate(self, length: int) -> None:
        content = self._loaded()
        before = len(content)
        del content[length:]
        content.extend(bytes(length - len(content)))
        self.first, self.last, self.dirty = min(self.first, before, length), max(self.last, length), True

    def sync(self) -> None:
        if self.dirty and self.content is not None:
            os.ftruncate(self.fd, len(self.content))
            data, at = memoryview(self.content)[self.first : self.last], self.first
            while data:
                done = os.pwrite(self.fd, data, at)
                data, at = data[done:], at + done
            self.first, self.last, self.dirty = sys.maxsize, 0, False

    def _loaded(self) -> bytearray:
        if self.content is None:
            self.content = bytearray(os.pread(self.fd, os.fstat(self.fd).st_size, 0))
        return self.content


class _Disk:
    """The operations of mfusepy. One call at a time."""

    use_ns = True

    def __init__(self, folder: str, strict: bool) -> None:
        self._folder, self._strict = folder, strict
        self._files: dict[int, _File] = {}  # by number of the node, so that a rename changes nothing
        self._handles: dict[int, tuple[_File, bool]] = {}  # and whether each write is synced
        self._last = 0

    # -- bytes

    def create(self, path: str, mode: int, flags: int = 0) -> int:
        os.close(os.open(self._at(path), os.O_CREAT | os.O_RDWR, mode))
        return self.open(path, flags if isinstance(flags, int) else 0)

    def open(self, path: str, flags: int) -> int:
        file = self._file(path)
        if flags & os.O_TRUNC:
            file.truncate(0)
        self._last += 1
        file.handles += 1
        self._handles[self._last] = file, bool(flags & (os.O_SYNC | os.O_DSYNC))
        return self._last

    def read(self, _path: str, size: int, offset: int, handle: int) -> bytes:
        return self._handles[handle][0].read(size, offset)

    def write(self, _path: str, data: bytes, offset: int, handle: int) -> int:
        file, synced = self._handles[handle]
        file.write(data, offset)
        if synced:
            file.sync()
        return len(data)

    def truncate(self, path: str, length: int, handle: int | None = None) -> int:
        file = self._file(path) if handle is None else self._handles[handle][0]
        file.truncate(length)
        return 0

    def fsync(self, _path: str, _data_only: int, handle: int) -> int:
        self._handles[handle][0].sync()
        return 0

    def release(self, _path: str, handle: int) -> int:
        file, _ = self._handles.pop(handle)
        file.handles -= 1
        self._forget(file)
        return 0

    def _file(self, path: str) -> _File:
        found = self._files.get(os.stat(self._at(path)).st_ino)
        if found is None:
            found = _File(self._at(path))
            self._files[found.ino] = found
        return found

    def _forget(self, file: _File, *, deleted: bool = False) -> None:
        if not file.handles and (deleted or not file.dirty):
            self._files.pop(file.ino, None)
            os.close(file.fd)

    # -- names

    def rename(self, old: str, new: str) -> int:
        file = self._files.get(os.lstat(self._at(old)).st_ino)
        if file is not None and not self._strict:
            file.sync()
        replaced = self._unsynced(new)
        os.rename(self._at(old), self._at(new))
        for one, deleted in ((replaced, True), (file, False)):
            if one is not None:
                self._forget(one, deleted=deleted)
        return 0

    def unlink(self, path: str) -> int:
        file = self._unsynced(path)
        os.unlink(self._at(path))
        if file is not None:
            self._forget(file, deleted=True)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def readdir(self, path: str, _handle: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def _unsynced(self, path: str) -> _File | None:
        try:
            return self._files.get(os.lstat(self._at(path)).st_ino)
        except FileNotFoundError:
            return None

    # -- what is told of them

    def getattr(self, path: str, _handle: int | None = None) -> dict[str, int]:
        found = os.lstat(self._at(path))
        told = {name: getattr(found, name) for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")}
        told |= {name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
        file = self._files.get(found.st_ino)
        if file is not None and file.content is not None:
            told["st_size"] = len(file.content)
        return told

    def statfs(self, _path: str) -> dict[str, int]:
        found = os.statvfs(self._folder)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times)
        return 0

    def _at(self, path: str) -> str:
        return self._folder + path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.unsynced_disk", allow_abbrev=False)
    parser.add_argument("folder")
    parser.add_argument("mount")
    parser.add_argument("--strict", action="store_true", help="let a rename sync nothing")
    parsed = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import mfusepy  # needs libfuse

    disk = _Disk(os.path.realpath(parsed.folder), parsed.strict)
    mfusepy.FUSE(disk, parsed.mount, foreground=True, nothreads=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
