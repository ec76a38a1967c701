"""Keeps bytes of batches on the local disk, within a bound, in files without a name, which end with the process."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

Place = tuple[int, int]  # offset and length


class ScratchSpace:
    """The disk space that all scratch files of one process have together."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` 0: nothing is kept."""
        self._left = most_bytes

    @property
    def left(self) -> int:
        """The bytes that may still be taken."""
        return self._left

    def take(self, size: int) -> bool:
        """Take space. Returns False if there is not as much."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """Give space back that was taken."""
        self._left += size


class ScratchFile:
    """A file that is only appended to and read. Its I/O is done in threads, one call at a time."""

    def __init__(self, space: ScratchSpace) -> None:
        self._space = space
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()  # a thread may be reading or writing when its batch is stopped
        self._size = 0
        self._closed = False

    @property
    def size(self) -> int:
        """The bytes that were appended."""
        return self._size

    @property
    def closed(self) -> bool:
        """True once the file was removed."""
        return self._closed

    async def append(self, pieces: Sequence[bytes]) -> None:
        """Append bytes. Raises OSError for a disk that is full or cannot be used, and where the space is used up."""
        size = sum(map(len, pieces))
        if not self._space.take(size):
            raise OSError(errno.EDQUOT, "the files of batches have as many bytes as they may")
        self._size += size
        await asyncio.to_thread(self._write, pieces)

    async def read(self, places: Mapping[int, Place]) -> dict[int, bytes]:
        """Return the bytes at these places, by the same keys. Raises OSError if they are not there as a whole."""
        return await asyncio.to_thread(self._read, places)

    def close(self) -> None:
        """Remove the file. One that was removed is fine."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()
                self._file = None
        self._space.give_back(self._size)
        self._size = 0

    # In a thread:

    def _write(self, pieces: Sequence[bytes]) -> None:
        with self._lock:
            if self._closed:
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `close` closes it
            view = memoryview(b"".join(pieces))
            while view:
                view = view[self._file.write(view) :]

    def _read(self, places: Mapping[int, Place]) -> dict[int, bytes]:
        with self._lock:
            if self._file is None:
                raise OSError("the file was removed")
            file = self._file.fileno()
            found = {key: os.pread(file, length, offset) for key, (offset, length) in places.items()}
        if short := [key for key, data in found.items() if len(data) != places[key][1]]:
            raise OSError(f"line {short[0]} is not there as a whole")
        return found
