"""Keeps copies of the input files of running batches on the local disk: lines are published in another order than the file's.

A chunk of the store holds many lines, so reading each stretch of lines from there would read most of the file for every prefix
that its lines have.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import structlog

from headrace.broker.batches import metrics
from headrace.broker.batches.scratch_space import Place, ScratchFile, ScratchSpace

log = structlog.get_logger()

WRITE_BYTES = 1024 * 1024  # that are written at once


class InputCopy:
    """The copy of one input file. A disk that is full, or cannot be used, ends the copy and nothing else."""

    def __init__(self, space: ScratchSpace, batch: str) -> None:
        """The copy is empty until a file was read through `copied`."""
        self._batch = batch
        self._file = ScratchFile(space)
        self._whole = False

    async def copied(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield all chunks, and write them on the way."""
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
        """Remove the copy. One that was removed is fine."""
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
