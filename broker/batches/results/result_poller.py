"""Looks for the results of a batch's lines, and keeps what was seen: which lines have ended, and their lines of the files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from headrace.broker.batches import metrics
from headrace.broker.batches.ports import LineResults
from headrace.broker.batches.progress import LineProgress
from headrace.broker.batches.record import BatchRecord, line_name
from headrace.broker.batches.results.kept_lines import KeptLines
from headrace.broker.batches.results.result_files import pages
from headrace.broker.batches.results.seen_results import SeenResults
from headrace.broker.batches.scratch_space import ScratchSpace
from headrace.broker.messages import JobResult

LOOK_S = 0.25  # between two looks at the results of lines that are out
LOOK_ALL_S = 1.0  # between two looks at all of them: lines end about in the order in which they were published
PAGE = 250  # results that are read at once


class ResultPoller:
    """The results of one batch as far as this process has seen them."""

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
        """Remove the lines that are kept, and those that the carrier would hand over."""
        if self._seen is not None:
            self._seen.forget(self._tenant, self._batch)
        if self.kept is not None:
            self.kept.close()

    async def look(self, numbers: Iterable[int]) -> None:
        """Look at these lines. Raises JetStreamError."""
        for page in pages(numbers, PAGE):
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
        for page in pages(self.progress.out, PAGE):
            left = self.progress.waiting
            await self.look(page)
            if self.progress.waiting == left and not whole:
                break
        now = asyncio.get_running_loop().time()
        self._next_s = now + LOOK_S
        if whole:
            self._next_whole_s = now + LOOK_ALL_S

    async def pause(self) -> None:
        """Wait until it is worth looking again."""
        await asyncio.sleep(LOOK_S)

    async def _ended(self, results: Mapping[int, JobResult]) -> None:
        """Note results of lines that have run."""
        before = self.progress.counts
        await self.see(results)
        after = self.progress.counts
        metrics.LINES.labels("completed").inc(after.completed - before.completed)
        metrics.LINES.labels("failed").inc(after.failed - before.failed)

    async def see(self, results: Mapping[int, JobResult]) -> None:
        """Note results that were seen, by the numbers of their lines."""
        for number, result in results.items():
            self.progress.see(number, result)
        if self.kept is not None:
            await self.kept.keep(results)
