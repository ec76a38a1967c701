"""What the caller of `Ingress.submit` reads: the rows of one request, in order, then its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
from headrace.broker.ingress.row_dispatch import RowDispatcher
from headrace.broker.messages import JobFault, Row

_FAULTS: dict[str, type[JobError]] = {
    kind.code: kind
    for kind in (DeadlineExceeded, JobCancelled, JobFailed, JobWithdrawn, PoisonJob, ResumeImpossible, SlowClient)
}


def fault_error(fault: JobFault) -> JobError:
    """The exception that a fault on the wire stands for; an unknown code is an engine failure."""
    if fault.code == JobInvalid.code:
        return JobInvalid(fault.message, param=fault.param)
    if fault.code in _FAULTS:
        return _FAULTS[fault.code](fault.message)
    if fault.retry_after_s is not None:
        return JobRefused(fault.message, reason=fault.code, retry_after_s=fault.retry_after_s)
    return JobFailed(fault.message)


class JobStream:
    """The token stream of one request. One reader; bounded; the judge fills it."""

    __slots__ = (
        "_cancel",
        "_drained",
        "_ended",
        "_fault",
        "_limit",
        "_loop",
        "_passing",
        "_rows",
        "_sink",
        "_waiter",
        "id",
        "passed_s",
        "paused_since_s",
    )

    def __init__(
        self,
        request_id: str,
        *,
        limit: int,
        drained: Callable[[str], None],
        cancel: Callable[[str], None],
        passing: RowDispatcher,
    ) -> None:
        self.id = request_id
        self.paused_since_s: float | None = None
        self.passed_s = 0.0
        self._passing = passing
        self._sink: Callable[[list[Row]], bool] | None = None
        self._limit = limit
        self._drained = drained
        self._cancel = cancel
        self._rows: list[Row] = []
        self._ended = False
        self._fault: JobFault | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    # the judge's side -------------------------------------------------------------------------------------------

    def take(self, row: Row) -> bool:
        if len(self._rows) >= self._limit:
            if self.paused_since_s is None:
                self.paused_since_s = self._loop.time()
            return False
        fin = row.fin
        if fin is not None and fin.fault is not None:
            row = msgspec.structs.replace(row, fin=None)  # the fault is raised by rows(), after the tokens before it
        self._rows.append(row)
        if self._sink is not None:
            if len(self._rows) == 1 or fin is not None:
                self._passing.add(self, last=fin is not None)
            return True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return True

    def end(self, fault: JobFault | None) -> None:
        self._ended = True
        self._fault = fault
        if self._sink is not None and self._rows:
            self._passing.add(self, last=True)  # these are passed on first
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # the reader's side ------------------------------------------------------------------------------------------

    async def rows(self) -> list[Row]:
        """Wait for at least one row and return all that are there.

        Empty once the stream is finished. Raises the JobError that ended the request, after all rows before it were
        returned. Cancelling the wait does not cancel the request: call `cancel`.
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

    async def pass_to(self, sink: Callable[[list[Row]], bool]) -> None:
        """Give rows to `sink` as they come, in order; quicker than `rows`, because nobody is woken for them.

        Returns once `sink` has returned False (it has used what it was given all the same) or the stream has ended; `rows` then
        tells the rest.  Raises what `sink` raises.  Cancelling the wait loses no row.
        """
        if self._rows and not sink(self._take()):
            return
        if self._ended:
            return
        self._waiter = self._loop.create_future()
        self._sink = sink
        self.passed_s = self._loop.time()
        self._passing.readers += 1
        try:
            await self._waiter
        finally:
            self._passing.readers -= 1
            self._waiter = self._sink = None

    def pass_on(self) -> None:
        """What has come for the sink."""
        sink, waiter = self._sink, self._waiter
        if sink is None or waiter is None or waiter.done() or not self._rows:
            return  # its reader has gone, or reads by itself
        try:
            more = sink(self._take())
        except Exception as error:  # it is the reader's, whom it is told
            if not waiter.done():
                waiter.set_exception(error)
            return
        if (not more or self._ended) and not waiter.done():  # the sink may have found that its reader has to go
            waiter.set_result(None)

    def _take(self) -> list[Row]:
        rows, self._rows = self._rows, []
        if self.paused_since_s is not None:
            self.paused_since_s = None
            self._drained(self.id)
        return rows

    @property
    def finished(self) -> bool:
        """Every choice has ended well and every row was read."""
        return self._ended and self._fault is None and not self._rows

    def cancel(self) -> None:
        """Give the request up; its work stops wherever it is. Fine to call at any time and twice."""
        if not self._ended:
            self._cancel(self.id)
