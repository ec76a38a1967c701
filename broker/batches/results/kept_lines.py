"""Keeps lines of result files on the local disk as soon as their results are seen, so that each result is read once.

A result never changes, so a line made of it stays true. Lines that are not kept here are made of their results again: those of
large results, whose answers are objects, and all of them where the disk is full or cannot be used.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import structlog

from headrace.broker.batches import metrics
from headrace.broker.batches.lines import output_line
from headrace.broker.batches.record import line_name
from headrace.broker.batches.scratch_space import ScratchFile, ScratchSpace
from headrace.broker.messages import JobResult

log = structlog.get_logger()


class KeptLines:
    """The lines of one batch whose results were seen: twelve bytes of memory each."""

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
        """Return those of these lines that are kept, by number."""
        places = {number: (self._offset[number - 1], length) for number in numbers if (length := self._length[number - 1])}
        if not places or self._file.closed:
            return {}
        try:
            return await self._file.read(places)
        except OSError as error:
            self._give_up(str(error))
            return {}

    def close(self) -> None:
        """Remove what is kept. Nothing kept is fine."""
        self._file.close()

    def _give_up(self, why: str) -> None:
        self.close()
        metrics.NOT_KEPT.inc()
        log.warning("batch.results_not_kept", batch=self._batch, error=why)
