"""Delivers rows to stream readers by callback, in batches per event-loop turn, instead of waking a task per row.

Waking a task for every row costs more than the task does with the row.  A reader that only has to be called registers here
instead; the rows that arrive for it in one turn of the event loop are delivered together in the next turn.

A write to a socket costs more than the event in it, too.  So rows that arrive soon after the last delivery to their reader wait
for more, unless they are the last of the stream: a slower stream never waits, the rows of a faster one are delivered in groups.
The wait grows with the number of readers, as the time that their writes take does: with few readers it is short, with many it
is `gather_s`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

MOST = 256  # readers served in one turn of the loop: about a millisecond
PER_READER_S = 0.000_05  # about four times the time of one write: the writes of fast streams take a quarter of the time


class PendingStream(Protocol):
    """A stream with rows to deliver. `delivered_s` is the loop time of its last delivery."""

    delivered_s: float

    def deliver(self) -> None:
        """Give the rows to the reader, if there still are any. Must not raise."""


class RowDispatcher:
    """Delivers the rows of all streams of one ingress."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, gather_s: float = 0.0) -> None:
        """`gather_s`: the longest time that rows wait for more; 0 = they do not wait."""
        self.loop = loop  # of all readers
        self.readers = 0  # readers that take rows by callback now
        self._most_s = gather_s
        self._due: list[PendingStream] = []
        self._waiting: list[PendingStream] = []

    def add(self, stream: PendingStream, *, last: bool) -> None:
        """Have the rows of `stream` delivered. Call it once per batch, and once more for the `last` rows."""
        gather_s = self.readers * PER_READER_S
        if gather_s > self._most_s:
            gather_s = self._most_s
        if last or self.loop.time() - stream.delivered_s >= gather_s:
            self._due.append(stream)
            if len(self._due) == 1:
                self.loop.call_soon(self._deliver_due)
        else:
            self._waiting.append(stream)
            if len(self._waiting) == 1:
                self.loop.call_later(gather_s, self._release_waiting)

    def _release_waiting(self) -> None:
        if not self._due:
            self.loop.call_soon(self._deliver_due)
        self._due += self._waiting
        self._waiting = []

    def _deliver_due(self) -> None:
        now = self.loop.time()
        due, self._due = self._due[:MOST], self._due[MOST:]
        if self._due:
            self.loop.call_soon(self._deliver_due)
        for stream in due:
            stream.delivered_s = now
            stream.deliver()
