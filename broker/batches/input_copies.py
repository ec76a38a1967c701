"""Keeps copies of the input files of running batches on the local disk: lines are published in another order than the file's.

A chunk of the store holds many lines, so reading each stretch of lines from there would read most of the file for every prefix
that its lines have. A copy has no name in its folder, so the system removes it when the process ends, in whatever way.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from typing import BinaryIO

import structlog

from headrace.broker.batches import metrics

log = structlog.get_logger()

WRITE_BYTES = 1024 * 1024  # that are written at once


class InputCopies:
    """The disk space for the copies of one process."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` of all copies together; 0: there are none."""
        self._left = most_bytes

    @property
    def left(self) -> int:
        """The bytes that further copies may take."""
        return self._left

    def begin(self, batch: str) -> InputCopy:
        """Return an empty copy for a batch."""
        return InputCopy(self, batch)

    def take(self, size: int) -> bool:
        """Take space. Returns False if there is not as much."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """Give space back that was taken."""
        self._left += size


class InputCopy:
    """The copy of one input file. A disk that is full, or cannot be used, ends the copy and nothing else."""

    def __init__(self, copies: InputCopies, batch: str) -> None:
        self._copies = copies
        self._batch = batch
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()  # a thread may be reading or writing when its batch is stopped
        self._taken = 0
        self._whole = self._closed = False

    async def copied(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield all chunks, and write them on the way."""
        pending: list[bytes] = []
        size = 0
        async for chunk in chunks:
            yield chunk
            pending.append(chunk)
            size += len(chunk)
            if size >= WRITE_BYTES:
                await self._add(pending, size)
                pending, size = [], 0
        await self._add(pending, size)
        self._whole = not self._closed

    async def lines(self, places: Mapping[int, tuple[int, int]]) -> dict[int, bytes] | None:
        """Return lines by their numbers, from their offsets and lengths. None if the copy does not have all of the file."""
        if not self._whole:
            return None
        try:
            return await asyncio.to_thread(self._read, places)
        except OSError as error:
            self._give_up(str(error))
            return None

    def close(self) -> None:
        """Remove the copy. One that was removed is fine."""
        with self._lock:
            self._whole, self._closed = False, True
            if self._file is not None:
                self._file.close()
                self._file = None
        self._copies.give_back(self._taken)
        self._taken = 0

    async def _add(self, pieces: list[bytes], size: int) -> None:
        if self._closed or not size:
            return
        if not self._copies.take(size):
            self._give_up("the copies have as many bytes as they may")
            return
        self._taken += size
        try:
            await asyncio.to_thread(self._write, pieces)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self.close()
        metrics.NOT_COPIED.inc()
        log.warning("batch.input_not_copied", batch=self._batch, error=why)

    # In a thread:

    def _write(self, pieces: list[bytes]) -> None:
        with self._lock:
            if self._closed:
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `close` closes it
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[self._file.write(view) :]

    def _read(self, places: Mapping[int, tuple[int, int]]) -> dict[int, bytes]:
        with self._lock:
            if self._file is None:
                raise OSError("the copy was removed")
            file = self._file.fileno()
            found = {number: os.pread(file, length, offset) for number, (offset, length) in places.items()}
        if short := [number for number, line in found.items() if len(line) != places[number][1]]:
            raise OSError(f"line {short[0]} is not there as a whole")
        return found
