"""Streams tables to a tab as server-sent events: all rows at first, then once a second what has changed.

A tab that is slow gets fewer updates, not a queue of them: the next one is computed when the last one is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headrace.console.deltas import Rows, changes
from headrace.console.guard import ConsoleGuard
from headrace.console.sections import Sections
from headrace.frontend.errors import BadRequest, FrontendError

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
