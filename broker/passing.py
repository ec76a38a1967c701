"""Rows on their way to readers that take them without being woken.

Waking a task for every row costs more than what it does with the row.  A reader that only has to be called registers here
instead; what one turn of the event loop brings for it is passed on in the next one, all together.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

MOST = 256  # readers served in one turn of the loop: about a millisecond


class Due(Protocol):
    """Somebody for whom rows have arrived."""

    def pass_on(self) -> None:
        """Must not raise."""


class Passing:
    """One per ingress."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Due] = []

    def add(self, stream: Due) -> None:
        """Once per batch of rows."""
        self._due.append(stream)
        if len(self._due) == 1:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        due, self._due = self._due[:MOST], self._due[MOST:]
        if self._due:
            self._loop.call_soon(self._run)
        for stream in due:
            stream.pass_on()
