"""The console's tables: each is read once per interval for all tabs, and a tab is sent only what has changed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headrace.broker.errors import WireError
from headrace.console.guard import ConsoleGuard
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.jetstream.errors import JetStreamError

Row = Mapping[str, Any]  # column → a value of JSON
Rows = Mapping[str, Row]  # id → row
Delta = dict[str, dict[str, Any] | None]  # id → the columns that changed; None: the row is gone


def changes(old: Rows, new: Rows) -> Delta:
    """Return what makes `new` of `old`. A column that a row no longer has is sent as null."""
    if old is new:
        return {}
    delta: Delta = {key: None for key in old if key not in new}
    for key, row in new.items():
        before = old.get(key)
        if before is None:
            delta[key] = dict(row)
        elif before != row:
            changed = {column: value for column, value in row.items() if column not in before or before[column] != value}
            changed |= {column: None for column in before if column not in row}
            delta[key] = changed
    return delta


def applied(old: Rows, delta: Delta) -> dict[str, dict[str, Any]]:
    """Return `old` with these changes, as a tab computes it."""
    rows = {key: dict(row) for key, row in old.items() if delta.get(key, row) is not None}
    for key, changed in delta.items():
        if changed is not None:
            rows[key] = {**rows.get(key, {}), **changed}
    return rows


# Keeps the tables that the console's tabs watch: each is read at most once per interval, however many tabs watch it.
#
# Nothing is kept but the last state of a table, and that only for a moment: a tab gets a table when it asks, and what changed
# since then from then on.

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
    def __init__(self, sources: Mapping[str, Source], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = dict(sources)
        self._tables = {name: Table() for name in sources}
        self._clock = clock

    @property
    def names(self) -> frozenset[str]:
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
        async def read() -> Rows:
            async with self._lock:
                if self._clock() - self._read_at_s >= self._every_s:
                    self._tables = await self._read()
                    self._read_at_s = self._clock()
                return self._tables[table]

        return Source(read)


# Streams tables to a tab as server-sent events: all rows at first, then once a second what has changed.
#
# A tab that is slow gets fewer updates, not a queue of them: the next one is computed when the last one is written.

INTERVAL_S = 1.0
MOST_TABS = 64
SILENT_BEATS = 10  # intervals without a change, after which a comment shows that the console is there


class TooManyTabs(FrontendError, status=503, code="too_many_tabs", retriable=True):
    """As many tabs as the console serves are open."""


class LiveTables:
    """The endpoint `/console/events`."""

    def __init__(self, sections: Sections, guard: ConsoleGuard, *, interval_s: float = INTERVAL_S) -> None:
        self._sections = sections
        self._guard = guard
        self._interval_s = interval_s
        self.tabs = 0
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all streams at their next beat: they have no end of their own, and the process is about to stop."""
        self._closed.set()

    async def events(self, request: Request) -> Response:
        """Stream the tables that `tables` names. Raises BadRequest for one that is not there, and TooManyTabs."""
        await self._guard.check_reader(request.headers)
        wanted = [name for name in request.query_params.get("tables", "").split(",") if name]
        if unknown := sorted(set(wanted) - self._sections.names):
            known = ", ".join(sorted(self._sections.names))
            raise BadRequest(f"there is no table {unknown[0][:40]!r}; there are {known}", param="tables", code="unknown_table")
        if not wanted:
            raise BadRequest("name the tables to watch", param="tables", code="no_table")
        if self.tabs >= MOST_TABS:
            raise TooManyTabs(f"{MOST_TABS} tabs are open already", retry_after_s=5.0)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(wanted), media_type="text/event-stream", headers=headers)

    async def _stream(self, wanted: Sequence[str]) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        self.tabs += 1
        try:
            sent: dict[str, Rows] = {}
            troubles: dict[str, str] = {}
            silent = 0
            while not self._closed.is_set():
                due_s = loop.time() + self._interval_s
                update: dict[str, object] = {}
                for name in wanted:
                    table = await self._sections.current(name)
                    if name not in sent:
                        update[name] = {"all": table.rows}
                    elif delta := changes(sent[name], table.rows):
                        update[name] = {"changes": delta}
                    sent[name] = table.rows
                    if table.trouble != troubles.get(name, ""):
                        troubles[name] = table.trouble
                        update.setdefault("troubles", {name: each for name, each in troubles.items() if each})
                silent = 0 if update else silent + 1
                if update:
                    yield b"data: " + msgspec.json.encode(update) + b"\n\n"
                elif silent % SILENT_BEATS == 0:
                    yield b": nothing has changed\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due_s):
                        await self._closed.wait()
        finally:
            self.tabs -= 1
