"""Hands the results that the carrier of this process has seen to the owner of their batch, which then need not read them."""

from __future__ import annotations

from headrace.broker.batches.record import line_name
from headrace.broker.durable.names import JobRef
from headrace.broker.messages import JobResult

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
        """Keep results of this batch from now on."""
        self._waiting.setdefault((tenant, batch_id), {})

    def forget(self, tenant: str, batch_id: str) -> None:
        """Keep no more results of this batch. One that was not expected is fine."""
        self.take(tenant, batch_id)
        self._waiting.pop((tenant, batch_id), None)

    def see(self, job: JobRef, result: JobResult) -> None:
        """Note the result that a job has at the broker: whatever its publisher named as its batch, only a line of it counts."""
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
        """Return the results that were seen since the last call, by the numbers of their lines."""
        waiting = self._waiting.get((tenant, batch_id))
        if not waiting:
            return {}
        self._waiting[tenant, batch_id] = {}
        self._bytes -= sum(map(_size_of, waiting.values()))
        return waiting


def _number_of(job: JobRef) -> int | None:
    """Return the number of the line whose job this is, None if it is none of its batch."""
    digits = job.name.rpartition("-")[2]
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 9:
        return None
    number = int(digits)
    return number if number and line_name(job.batch, number) == job.name else None


def _size_of(result: JobResult) -> int:
    return 0 if result.response is None else len(result.response.body)
