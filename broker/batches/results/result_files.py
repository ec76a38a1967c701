"""Writes the two files of a batch from the results of its lines, under ids that are new for each try."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import NamedTuple

import structlog

from headrace.broker.batches.lines import FileKind, lost_line, output_line
from headrace.broker.batches.ports import BatchFiles, LineResults
from headrace.broker.batches.progress import LineProgress
from headrace.broker.batches.record import BatchRecord, line_name
from headrace.broker.batches.results.kept_lines import KeptLines
from headrace.broker.errors import MalformedMessage
from headrace.broker.messages import JobResult
from headrace.jetstream.errors import ObjectCorrupt, ObjectNotFound, RequestTimeout

log = structlog.get_logger()

PAGE = 128  # results that are read at once
WRITE_BYTES = 256 * 1024  # of lines that are passed on at once
KINDS: tuple[FileKind, ...] = ("output", "error")
LOOK_AGAIN_S = 0.2
LOOKS = 25  # at a page of results that were all seen before: a read may be old


class WrittenFiles(NamedTuple):
    """The files of one try; None where a file would be empty."""

    output: str | None
    error: str | None


class ResultFiles:
    """Writes and deletes the files of batches."""

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
    """Return the id of the file that a try writes."""
    return f"file-{hashlib.sha256(f'{batch_id} {nonce} {kind}'.encode()).hexdigest()[:32]}"


def new_try() -> str:
    """Return a nonce for a try to write files."""
    return secrets.token_hex(8)


def pages(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    """Yield numbers in lists of `size`, the last one shorter."""
    page: list[int] = []
    for number in numbers:
        page.append(number)
        if len(page) == size:
            yield page
            page = []
    if page:
        yield page
