"""Buffers the token stream of a request: its rows in order, then its end, for the caller of `Ingress.submit`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.broker.errors import (
    DeadlineExceeded,
    JobCancelled,
    JobError,
    JobFailed,
    JobInvalid,
    JobRefused,
    JobWithdrawn,
    PoisonJob,
    ResumeImpossible,
    SlowClient,
)
from headrace.broker.ingress.timeline import RequestTimeline
from headrace.broker.messages.frames import JobFault, Row

# Delivers rows to stream readers by callback, in batches per event-loop turn, instead of waking a task per row.
#
# Waking a task for every row costs more than the task does with the row. A reader that only has to be called registers here
# instead; the rows that arrive for it in one turn of the event loop are delivered together in the next turn.
#
# A write to a socket costs more than the event in it, too. So rows that arrive soon after the last delivery to their reader
# wait for more, unless they are the last of the stream: a slower stream never waits, the rows of a faster one are delivered
# in groups. The wait grows with the number of readers, as the time that their writes take does: with few readers it is short,
# with many it is `gather_s`.

MOST = 256  # readers served in one turn of the loop: about a millisecond
PER_READER_S = 0.000_05  # about four times the time of one write: the writes of fast streams take a quarter of the time


class PendingStream(Protocol):
    """A stream with rows to deliver. `delivered_s` is the loop time of its last delivery."""

    delivered_s: float

    def deliver(self) -> None:
        """Give the rows to the reader, if there still are any. Must not raise."""


class RowDispatcher:
    def __init__(self, loop: asyncio.AbstractEventLoop, *, gather_s: float = 0.0) -> None:
        """`gather_s`: the longest time that rows wait for more; 0 = they do not wait."""
        self.loop = loop  # of all readers
        self.readers = 0  # readers that take rows by callback now
        self._most_s = gather_s
        self._due: list[PendingStream] = []
        self._waiting: list[PendingStream] = []

    def add(self, stream: PendingStream, now_s: float, *, last: bool) -> None:
        """Queue the rows of `stream` for delivery. Call it once per batch, and once more for the `last` rows."""
        gather_s = self.readers * PER_READER_S
        if gather_s > self._most_s:
            gather_s = self._most_s
        if last or now_s - stream.delivered_s >= gather_s:
            if not self._due:
                self.loop.call_soon(self._deliver_due)
            self._due.append(stream)
        else:
            if not self._waiting:
                self.loop.call_later(gather_s, self._release_waiting)
            self._waiting.append(stream)

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


_FAULTS: dict[str, type[JobError]] = {
    kind.code: kind
    for kind in (DeadlineExceeded, JobCancelled, JobFailed, JobWithdrawn, PoisonJob, ResumeImpossible, SlowClient)
}


def fault_error(fault: JobFault) -> JobError:
    """Return the exception that a fault on the wire stands for; an unknown code is an engine failure."""
    if fault.code == JobInvalid.code:
        return JobInvalid(fault.message, param=fault.param)
    if fault.code in _FAULTS:
        return _FAULTS[fault.code](fault.message)
    if fault.retry_after_s is not None:
        return JobRefused(fault.message, reason=fault.code, retry_after_s=fault.retry_after_s)
    return JobFailed(fault.message)


class StreamOwner(Protocol):
    def on_drained(self, request_id: str) -> None:
        """Continue a stream that was paused: its reader has taken all rows."""

    def on_cancelled(self, request_id: str) -> None:
        """End a request that its reader has given up."""

    def on_ended(self, request_id: str, fault: JobFault | None) -> None:
        """Note the end of a request, which its reader may not have reached yet."""


class JobStream:
    __slots__ = (
        "_dispatcher",
        "_ended",
        "_fault",
        "_limit",
        "_loop",
        "_owner",
        "_rows",
        "_sink",
        "_waiter",
        "delivered_s",
        "id",
        "paused_since_s",
        "timeline",
    )

    def __init__(
        self,
        request_id: str,
        *,
        limit: int,
        owner: StreamOwner,
        dispatcher: RowDispatcher,
    ) -> None:
        """`limit`: rows that wait for the reader before the stream is paused."""
        self.id = request_id
        self.timeline: RequestTimeline | None = None  # set by the ingress
        self.paused_since_s: float | None = None
        self.delivered_s = 0.0
        self._dispatcher = dispatcher
        self._sink: Callable[[list[Row]], bool] | None = None
        self._limit = limit
        self._owner = owner
        self._rows: list[Row] = []
        self._ended = False
        self._fault: JobFault | None = None
        self._loop = dispatcher.loop
        self._waiter: asyncio.Future[None] | None = None

    # Called by the judge:

    def take(self, row: Row, now_s: float) -> bool:
        rows = self._rows
        if rows and len(rows) >= self._limit:
            if self.paused_since_s is None:
                self.paused_since_s = now_s
            return False
        fin = row.fin
        if fin is not None and fin.fault is not None:
            row = msgspec.structs.replace(row, fin=None)  # the fault is raised by rows(), after the tokens before it
        first = not rows
        if first:
            self._rows = [row]
        else:
            rows.append(row)
        if self._sink is not None:
            if first or fin is not None:
                self._dispatcher.add(self, now_s, last=fin is not None)
        elif first and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return True

    def end(self, fault: JobFault | None) -> None:
        """End the stream after the rows it has; `fault` is raised to the reader then."""
        self._ended = True
        self._fault = fault
        self._owner.on_ended(self.id, fault)
        if self._sink is not None and self._rows:
            self._dispatcher.add(self, self._loop.time(), last=True)  # the rows are delivered before the end is
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # Called by the reader:

    async def rows(self) -> list[Row]:
        """Wait for at least one row and return all that have arrived.

        Returns an empty list once the stream is finished. Raises the JobError that ended the request, after all rows before it
        were returned. Cancelling the wait does not cancel the request: call `cancel`.
        """
        while True:
            if self._rows:
                return self._take()
            if self._ended:
                if self._fault is not None:
                    raise fault_error(self._fault)
                return []
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def deliver_to(self, sink: Callable[[list[Row]], bool]) -> None:
        """Call `sink` with the rows as they arrive, in order; faster than `rows`, because no task is woken for them.

        Returns once `sink` has returned False (it has used the rows of that call all the same) or the stream has ended; `rows`
        then gives the rest.  Raises the exception that `sink` raises.  Cancelling the wait loses no row.
        """
        if self._rows and not sink(self._take()):
            return
        if self._ended:
            return
        self._waiter = self._loop.create_future()
        self._sink = sink
        self.delivered_s = self._loop.time()
        self._dispatcher.readers += 1
        try:
            await self._waiter
        finally:
            self._dispatcher.readers -= 1
            self._waiter = self._sink = None

    def let_go(self) -> None:
        """Have `deliver_to` return before its time, if the reader waits there."""
        waiter = self._waiter
        if self._sink is not None and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def deliver(self) -> None:
        sink, waiter, rows = self._sink, self._waiter, self._rows
        if sink is None or waiter is None or waiter.done() or not rows:
            return  # the reader has gone, or reads with `rows`
        self._rows = []
        if self.paused_since_s is not None:
            self._go_on()
        try:
            more = sink(rows)
        except Exception as error:  # raised to the reader, who brought the sink
            if not waiter.done():
                waiter.set_exception(error)
            return
        if (not more or self._ended) and not waiter.done():  # the sink may have cancelled its reader
            waiter.set_result(None)

    def _take(self) -> list[Row]:
        rows, self._rows = self._rows, []
        if self.paused_since_s is not None:
            self._go_on()
        return rows

    def _go_on(self) -> None:
        self.paused_since_s = None
        self._owner.on_drained(self.id)

    @property
    def finished(self) -> bool:
        return self._ended and self._fault is None and not self._rows

    @property
    def ended(self) -> bool:
        return self._ended

    def cancel(self) -> None:
        """Give the request up; its work stops wherever it is. May be called at any time, and twice."""
        if not self._ended:
            self._owner.on_cancelled(self.id)
