"""Results of a batch's lines: polled, kept on the local disk, and written as its files.

A result never changes, so a line made of it stays true. Lines that are not kept on the disk are made again from their results:
those of large results, whose answers are objects, and all of them if the disk is full or unusable.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import structlog

from headrace.broker.batches import record as metrics
from headrace.broker.batches.fan_out import ScratchFile, ScratchSpace
from headrace.broker.batches.record import BatchRecord, FileKind, LineProgress, line_name, lost_line, output_line
from headrace.broker.batches.store import BatchFiles, LineResults
from headrace.broker.durable.names import JobRef
from headrace.broker.errors import MalformedMessage
from headrace.broker.messages.durable import JobResult
from headrace.jetstream.errors import ObjectCorrupt, ObjectNotFound, RequestTimeout

log = structlog.get_logger()


class KeptLines:
    def __init__(self, space: ScratchSpace, batch: str, total: int) -> None:
        self._batch = batch
        self._file = ScratchFile(space)
        self._offset = array("Q", bytes(8 * total))
        self._length = array("I", bytes(4 * total))  # 0 = not kept

    async def keep(self, results: Mapping[int, JobResult]) -> None:
        """Keep the lines of results, by their numbers. One that is kept already is left as it is."""
        new = {
            number: output_line(line_name(self._batch, number), result, result.response)
            for number, result in results.items()
            if result.object is None and not self._length[number - 1]
        }
        if not new or self._file.closed:
            return
        offset = self._file.size
        try:
            await self._file.append(list(new.values()))
        except OSError as error:
            self._give_up(str(error))
            return
        for number, line in new.items():
            self._offset[number - 1], self._length[number - 1] = offset, len(line)
            offset += len(line)

    async def read(self, numbers: Sequence[int]) -> dict[int, bytes]:
        places = {number: (self._offset[number - 1], length) for number in numbers if (length := self._length[number - 1])}
        if not places or self._file.closed:
            return {}
        try:
            return await self._file.read(places)
        except OSError as error:
            self._give_up(str(error))
            return {}

    def close(self) -> None:
        self._file.close()

    def _give_up(self, why: str) -> None:
        self.close()
        metrics.NOT_KEPT.inc()
        log.warning("batch.results_not_kept", batch=self._batch, error=why)


MOST_BYTES = 4 * 1024 * 1024  # of answers that wait for their owners, all batches together


class SeenResults:
    """The results of lines of the batches that are owned here, until their owners take them.

    What finds no room is left out: an owner looks at the results of all lines that are out, too.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._waiting: dict[tuple[str, str], dict[int, JobResult]] = {}  # by tenant and batch

    def expect(self, tenant: str, batch_id: str) -> None:
        self._waiting.setdefault((tenant, batch_id), {})

    def forget(self, tenant: str, batch_id: str) -> None:
        self.take(tenant, batch_id)
        self._waiting.pop((tenant, batch_id), None)

    def see(self, job: JobRef, result: JobResult) -> None:
        """Note the stored result of a job. Only lines of an expected batch count: publishers may name any batch."""
        waiting = self._waiting.get((job.tenant, job.batch))
        if waiting is None:
            return
        number = _number_of(job)
        size = _size_of(result)
        if number is None or number in waiting or self._bytes + size > self._most_bytes:
            return
        self._bytes += size
        waiting[number] = result

    def take(self, tenant: str, batch_id: str) -> dict[int, JobResult]:
        waiting = self._waiting.get((tenant, batch_id))
        if not waiting:
            return {}
        self._waiting[tenant, batch_id] = {}
        self._bytes -= sum(map(_size_of, waiting.values()))
        return waiting


def _number_of(job: JobRef) -> int | None:
    digits = job.name.rpartition("-")[2]
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 9:
        return None
    number = int(digits)
    return number if number and line_name(job.batch, number) == job.name else None


def _size_of(result: JobResult) -> int:
    return 0 if result.response is None else len(result.response.body)


PAGE = 128  # results that are read at once
WRITE_BYTES = 256 * 1024  # of lines that are passed on at once
KINDS: tuple[FileKind, ...] = ("output", "error")
LOOK_AGAIN_S = 0.2
LOOKS = 25  # at a page of results that were all seen before: a read may be old


class WrittenFiles(NamedTuple):
    output: str | None
    error: str | None


class ResultFiles:
    def __init__(self, files: BatchFiles, results: LineResults) -> None:
        self._files = files
        self._results = results

    async def write(
        self, record: BatchRecord, nonce: str, progress: LineProgress, kept: KeptLines | None = None
    ) -> WrittenFiles:
        """Write the files of a try from the results of all lines, which have been seen. Raises JetStreamError.

        `kept`: the lines that were made when the results were seen; results of others are read.
        """
        counts = progress.counts
        written: list[str | None] = []
        for kind, lines in zip(KINDS, (counts.completed, counts.failed), strict=True):
            file_id = result_file_id(record.id, nonce, kind) if lines else None
            if file_id is not None:
                name = f"{record.id}_{kind}.jsonl"
                await self._files.write(record, file_id, name, self._chunks(record, progress.of_kind(kind), kept))
            written.append(file_id)
        return WrittenFiles(*written)

    async def sweep(self, record: BatchRecord, nonces: Iterable[str]) -> None:
        """Delete the files of tries that can no longer win. Raises JetStreamError."""
        kept = {record.output_file_id, record.error_file_id}
        for nonce in nonces:
            for kind in KINDS:
                if (file_id := result_file_id(record.id, nonce, kind)) not in kept:
                    await self._files.delete(record.tenant, file_id)

    async def _chunks(self, record: BatchRecord, numbers: Iterator[int], kept: KeptLines | None) -> AsyncIterator[bytes]:
        for page in pages(numbers, PAGE):
            lines = await kept.read(page) if kept is not None else {}
            names = {number: line_name(record.id, number) for number in page if number not in lines}
            results = await self._read(record.tenant, list(names.values())) if names else {}
            pending: list[bytes] = []
            size = 0
            for number in page:
                line = lines[number] if number in lines else await self._line(record, names[number], results[names[number]])
                pending.append(line)
                size += len(line)
                if size >= WRITE_BYTES:
                    yield b"".join(pending)
                    pending, size = [], 0
            yield b"".join(pending)

    async def _line(self, record: BatchRecord, name: str, result: JobResult) -> bytes:
        try:
            return output_line(name, result, await self._results.response(result))
        except (MalformedMessage, ObjectCorrupt, ObjectNotFound) as error:
            log.error("batch.result_lost", batch=record.id, line=name, error=str(error))
            return lost_line(name, result)

    async def _read(self, tenant: str, names: list[str]) -> dict[str, JobResult]:
        found: dict[str, JobResult] = {}
        for _ in range(LOOKS):
            found |= await self._results.get_many(tenant, [name for name in names if name not in found])
            if len(found) == len(names):
                return found
            await asyncio.sleep(LOOK_AGAIN_S)
        raise RequestTimeout(f"{len(names) - len(found)} results that were seen cannot be read")


def result_file_id(batch_id: str, nonce: str, kind: FileKind) -> str:
    return f"file-{hashlib.sha256(f'{batch_id} {nonce} {kind}'.encode()).hexdigest()[:32]}"


def new_try() -> str:
    return secrets.token_hex(8)


def pages(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    page: list[int] = []
    for number in numbers:
        page.append(number)
        if len(page) == size:
            yield page
            page = []
    if page:
        yield page


LOOK_S = 0.25  # between two looks at the results of lines that are out
LOOK_ALL_S = 1.0  # between two looks at all of them: lines end about in the order in which they were published
POLLED_PAGE = 250  # results that are read at once


class ResultPoller:
    def __init__(
        self, results: LineResults, record: BatchRecord, scratch: ScratchSpace | None, seen: SeenResults | None = None
    ) -> None:
        """`scratch` None: no lines are kept, so all results are read again for the files. `seen`: by the carrier here."""
        total = record.counts.total
        self.progress = LineProgress(total)
        self.kept = KeptLines(scratch, record.id, total) if scratch is not None else None
        self._results = results
        self._tenant = record.tenant
        self._batch = record.id
        self._seen = seen
        if seen is not None:
            seen.expect(record.tenant, record.id)
        self._next_s = self._next_whole_s = 0.0  # by the clock of the event loop

    def close(self) -> None:
        if self._seen is not None:
            self._seen.forget(self._tenant, self._batch)
        if self.kept is not None:
            self.kept.close()

    async def look(self, numbers: Iterable[int]) -> None:
        for page in pages(numbers, POLLED_PAGE):
            names = {line_name(self._batch, number): number for number in page}
            found = await self._results.get_many(self._tenant, list(names))
            await self._ended({names[name]: result for name, result in found.items()})

    async def look_at_out(self) -> None:
        """Take what the carrier here has seen, then look at the oldest lines that are out while pages of them have results.

        Now and then look at all of them: to do so each time, right after they were published too, costs the server several
        reads a line. Raises JetStreamError.
        """
        if self._seen is not None and (seen := self._seen.take(self._tenant, self._batch)):
            total = self.progress.counts.total
            await self._ended({number: result for number, result in seen.items() if number <= total})
        now = asyncio.get_running_loop().time()
        if now < self._next_s or not self.progress.waiting:
            return
        whole = now >= self._next_whole_s
        for page in pages(self.progress.out, POLLED_PAGE):
            left = self.progress.waiting
            await self.look(page)
            if self.progress.waiting == left and not whole:
                break
        now = asyncio.get_running_loop().time()
        self._next_s = now + LOOK_S
        if whole:
            self._next_whole_s = now + LOOK_ALL_S

    async def pause(self) -> None:
        await asyncio.sleep(LOOK_S)

    async def _ended(self, results: Mapping[int, JobResult]) -> None:
        before = self.progress.counts
        await self.see(results)
        after = self.progress.counts
        metrics.LINES.labels("completed").inc(after.completed - before.completed)
        metrics.LINES.labels("failed").inc(after.failed - before.failed)

    async def see(self, results: Mapping[int, JobResult]) -> None:
        for number, result in results.items():
            self.progress.see(number, result)
        if self.kept is not None:
            await self.kept.keep(results)
