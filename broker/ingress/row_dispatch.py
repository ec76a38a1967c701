"""Rows on their way to readers that take them without being woken.

Waking a task for every row costs more than what it does with the row.  A reader that only has to be called registers here
instead; what one turn of the event loop brings for it is passed on in the next one, all together.

A write to a socket costs more than the event in it, too.  So what comes for a reader soon after its last rows waits for more,
unless it is the end: a stream slower than that never waits, a faster one is passed on in pieces.  How soon is soon grows with
the number of readers, as the time that their writes take does: a few of them hardly wait, many wait `gather_s`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

MOST = 256  # readers served in one turn of the loop: about a millisecond
PER_READER_S = 0.000_05  # about four times what one write takes: the writes of fast streams take a quarter of the time


class Due(Protocol):
    """Somebody for whom rows have arrived. `passed_s`: when some were passed on last, on the loop's clock."""

    passed_s: float

    def pass_on(self) -> None:
        """Must not raise. Nothing happens where there are no rows (any more)."""


class RowDispatcher:
    """One per ingress."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, gather_s: float = 0.0) -> None:
        """`gather_s`: the longest that anybody waits, 0 = nobody does."""
        self.readers = 0  # that take rows without being woken now
        self._loop = loop
        self._most_s = gather_s
        self._due: list[Due] = []
        self._waiting: list[Due] = []

    def _gather_s(self) -> float:
        return min(self._most_s, self.readers * PER_READER_S)

    def add(self, stream: Due, *, last: bool) -> None:
        """Rows have come; once per batch, and once more for the `last` ones."""
        if last or self._loop.time() - stream.passed_s >= self._gather_s():
            self._due.append(stream)
            if len(self._due) == 1:
                self._loop.call_soon(self._run)
        else:
            self._waiting.append(stream)
            if len(self._waiting) == 1:
                self._loop.call_later(self._gather_s(), self._waited)

    def _waited(self) -> None:
        if not self._due:
            self._loop.call_soon(self._run)
        self._due += self._waiting
        self._waiting = []

    def _run(self) -> None:
        now = self._loop.time()
        due, self._due = self._due[:MOST], self._due[MOST:]
        if self._due:
            self._loop.call_soon(self._run)
        for stream in due:
            stream.passed_s = now
            stream.pass_on()
