"""Keeps the tables that the console's tabs watch: each is read at most once per interval, however many tabs watch it.

Nothing is kept but the last state of a table, and that only for a moment: a tab gets a table when it asks, and what changed
since then from then on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from headrace.broker.errors import WireError
from headrace.console.deltas import Rows
from headrace.jetstream.errors import JetStreamError

READ_TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True)
class Source:
    """A way to read a table, and the time for which what was read counts as current."""

    read: Callable[[], Awaitable[Rows]]
    every_s: float = 1.0


@dataclass(slots=True)
class Table:
    """The last state of a table. `trouble`: why it is not current; empty if it is."""

    rows: Rows = field(default_factory=dict)
    trouble: str = ""
    read_at_s: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sections:
    """All tables by name."""

    def __init__(self, sources: Mapping[str, Source], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = dict(sources)
        self._tables = {name: Table() for name in sources}
        self._clock = clock

    @property
    def names(self) -> frozenset[str]:
        """The names of all tables."""
        return frozenset(self._sources)

    async def current(self, name: str) -> Table:
        """Return a table, read anew if it is older than its interval. While it cannot be read, the last state stays."""
        table, source = self._tables[name], self._sources[name]
        async with table.lock:
            if self._clock() - table.read_at_s >= source.every_s:
                try:
                    async with asyncio.timeout(READ_TIMEOUT_S):
                        table.rows = await source.read()
                    table.trouble = ""
                except TimeoutError:
                    table.trouble = f"no answer within {READ_TIMEOUT_S:g} s"
                except (JetStreamError, WireError) as error:
                    table.trouble = str(error)
                table.read_at_s = self._clock()
        return table


class Shared:
    """A reading that gives several tables and is done once for all of them."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Mapping[str, Rows]]],
        *,
        every_s: float = 0.9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every_s` is a little less than the interval of the tables, so that each of them finds a new reading."""
        self._read = read
        self._every_s = every_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at_s = float("-inf")
        self._tables: Mapping[str, Rows] = {}

    def source(self, table: str) -> Source:
        """Return the source of one of the tables."""

        async def read() -> Rows:
            async with self._lock:
                if self._clock() - self._read_at_s >= self._every_s:
                    self._tables = await self._read()
                    self._read_at_s = self._clock()
                return self._tables[table]

        return Source(read)
