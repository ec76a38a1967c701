"""Publication of a batch's lines as stored jobs, each under an id of batch and line, with copies of the input on disk."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import structlog

from headrace.broker.batches import record as metrics
from headrace.broker.batches.record import BatchRecord, InputGone, line_name
from headrace.broker.batches.store import BatchFiles
from headrace.broker.batches.validation import LinePlan
from headrace.broker.messages.durable import HEADER_BATCH, HEADER_CLASS, HEADER_DEADLINE, HEADER_ENDPOINT, HEADER_JOB
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import Messaging, Outgoing
from headrace.jetstream.subjects import Subjects, slug

Place = tuple[int, int]  # offset and length


class ScratchSpace:
    """The disk space that all scratch files of one process have together."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` 0: nothing is kept."""
        self._left = most_bytes

    @property
    def left(self) -> int:
        return self._left

    def take(self, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
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
        return self._size

    @property
    def closed(self) -> bool:
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


# Keeps copies of the input files of running batches on the local disk: lines are published in another order than the file's.
#
# A chunk of the store holds many lines, so reading each stretch of lines from there would read most of the file for every
# prefix that its lines have.

log = structlog.get_logger()

WRITE_BYTES = 1024 * 1024  # that are written at once


class InputCopy:
    """The copy of one input file. A disk that is full, or cannot be used, ends the copy and nothing else."""

    def __init__(self, space: ScratchSpace, batch: str) -> None:
        self._batch = batch
        self._file = ScratchFile(space)
        self._whole = False

    async def copied(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        pending: list[bytes] = []
        size = 0
        async for chunk in chunks:
            yield chunk
            pending.append(chunk)
            size += len(chunk)
            if size >= WRITE_BYTES:
                await self._add(pending)
                pending, size = [], 0
        await self._add(pending)
        self._whole = not self._file.closed

    async def lines(self, places: Mapping[int, Place]) -> dict[int, bytes] | None:
        """Return lines by their numbers, from their offsets and lengths. None if the copy does not have all of the file."""
        if not self._whole:
            return None
        try:
            return await self._file.read(places)
        except OSError as error:
            self._give_up(str(error))
            return None

    def close(self) -> None:
        self._whole = False
        self._file.close()

    async def _add(self, pieces: list[bytes]) -> None:
        if self._file.closed or not pieces:
            return
        try:
            await self._file.append(pieces)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self.close()
        metrics.NOT_COPIED.inc()
        log.warning("batch.input_not_copied", batch=self._batch, error=why)


IN_FLIGHT = 64  # lines that are published together
IN_FLIGHT_BYTES = 1024 * 1024
TRIES = 3  # of a publish whose outcome is unknown, before the batch is read again


class Published(NamedTuple):
    """The outcome of a stretch: `full`, not all lines are stored; `too_large`, lines that fit into no message."""

    full: bool
    too_large: tuple[int, ...]


class FanOut:
    def __init__(self, messaging: Messaging, subjects: Subjects, files: BatchFiles) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._files = files

    async def lines(
        self, record: BatchRecord, plan: LinePlan, numbers: Sequence[int], copy: InputCopy | None = None
    ) -> dict[int, bytes]:
        """Return lines of the input file by their numbers, from its copy if that is whole. Raises InputGone, JetStreamError."""
        if copy is not None and (copied := await copy.lines({number: plan.place(number) for number in numbers})) is not None:
            return copied
        found: dict[int, bytes] = {}
        for start, length, inside in plan.ranges(numbers):
            parts = [p async for p in self._files.read(record.tenant, record.input_file_id, offset=start, length=length)]
            part = b"".join(parts)
            if len(part) != length:
                raise InputGone(f"file {record.input_file_id} has lost bytes {start} to {start + length}")
            for number in inside:
                offset, size = plan.place(number)
                found[number] = part[offset - start : offset - start + size]
        return found

    async def publish(self, record: BatchRecord, lines: Mapping[int, bytes]) -> Published:
        """Publish lines. Raises JetStreamError.

        A repeat is one job with what it repeats: its result is written once.
        """
        subject = self._subjects.job(slug(record.model), record.tenant)
        headers = {
            HEADER_ENDPOINT: record.endpoint,
            HEADER_CLASS: "batch",
            HEADER_DEADLINE: str(record.expires_at),
            HEADER_BATCH: record.id,
        }
        names = {number: line_name(record.id, number) for number in lines}
        messages = {
            number: Outgoing(subject, line, {**headers, HEADER_JOB: names[number]}, msg_id=names[number])
            for number, line in lines.items()
        }
        too_large: list[int] = []
        for page in _pages(lines):
            refused = await self._store({number: messages[number] for number in page})
            too_large += [number for number, error in refused.items() if isinstance(error, PayloadTooLarge)]
            if any(isinstance(error, QueueFull) for error in refused.values()):
                metrics.LINES.labels("queue_full").inc()
                return Published(full=True, too_large=tuple(too_large))
        metrics.LINES.labels("published").inc(len(lines))
        return Published(full=False, too_large=tuple(too_large))

    async def _store(self, left: Mapping[int, Outgoing]) -> Mapping[int, JetStreamError]:
        refused: dict[int, JetStreamError] = {}
        for attempt in range(TRIES):
            outcomes = await self._messaging.publish_all(list(left.values()))
            errors = {number: o for number, o in zip(left, outcomes, strict=True) if isinstance(o, JetStreamError)}
            for number, error in errors.items():
                if isinstance(error, QueueFull | PayloadTooLarge):  # the latter: the server took larger ones at the validation
                    refused[number] = error
                elif not isinstance(error, PublishUnknown) or attempt == TRIES - 1:
                    raise error
            left = {number: left[number] for number, error in errors.items() if isinstance(error, PublishUnknown)}
            if not left:
                break
        return refused


def _pages(lines: Mapping[int, bytes]) -> Iterator[list[int]]:
    page: list[int] = []
    size = 0
    for number, line in lines.items():
        page.append(number)
        size += len(line)
        if len(page) == IN_FLIGHT or size >= IN_FLIGHT_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page
