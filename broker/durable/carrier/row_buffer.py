"""Collects the rows of a job's requests until the job's own loop takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from headrace.broker.errors import JobError
from headrace.broker.ingress.stream import JobStream
from headrace.broker.messages import Row


class RowBuffer:
    """The rows of all requests of a job in the order in which they came, with choices that count over all requests."""

    def __init__(self, wake: asyncio.Event, on_rows: Callable[[list[Row]], object] | None) -> None:
        """`on_rows`: takes rows at once, so that the loop is not woken for each of them; otherwise they wait for it."""
        self.rows: list[Row] = []
        self.open = 0  # requests that have not ended; the caller of `read` counts them in
        self.error: JobError | None = None
        self._wake = wake
        self._on_rows = on_rows

    async def read(self, stream: JobStream, first_choice: int) -> None:
        """Read one request to its end. `first_choice`: the number of choices of the requests before it."""

        def sink(rows: list[Row]) -> bool:
            moved = [msgspec.structs.replace(row, choice=row.choice + first_choice) for row in rows] if first_choice else rows
            if self._on_rows is not None:
                self._on_rows(moved)
            else:
                self.rows += moved
                self._wake.set()
            return True

        try:
            await stream.deliver_to(sink)
            while not stream.finished and (rows := await stream.rows()):
                sink(rows)
        except JobError as error:
            self.error = self.error or error
        finally:
            self.open -= 1
            self._wake.set()
