"""The console's tables: each is read once per interval for all tabs, and a tab is sent only what has changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.base.errors import CommandError
from headrace.broker.errors import WireError
from headrace.broker.membership.members import machine_id
from headrace.broker.messages.control import Drain, Explain, Explanation, Routed, Stories, TellStories
from headrace.broker.messages.members import WorkerMember
from headrace.commands.control import announce, ask_all, ask_subjects, find_worker, live_workers, request_id, tell_worker
from headrace.commands.dlq import find_letter, run_again
from headrace.commands.trace import chronology, live_ingresses, live_routers, recorded_placements, story_data
from headrace.console.guard import KEY_HEADER, ConsoleGuard
from headrace.console.readers import Readers
from headrace.frontend.errors import BadRequest, Forbidden, FrontendError, RequestUnknown
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.health import exposition
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

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


# The console's routes that change dead letters and workers, and those about single requests and streams.

_ANSWER_S = 5.0


class NotDone(FrontendError, status=409, code="not_done"):
    """The deployment refused the act, or there is nothing to act on."""


class Actions:
    """The endpoints that change something, all by POST with the admin key."""

    def __init__(self, messaging: Messaging, names: Subjects, guard: ConsoleGuard, *, may_kill: bool) -> None:
        """`may_kill`: workers of this machine may be killed, to see what becomes of their streams."""
        self._messaging = messaging
        self._names = names
        self._guard = guard
        self._may_kill = may_kill

    def routes(self) -> list[Route]:
        return [
            Route("/console/api/letters/{seq:int}/drop", self.drop, methods=["POST"]),
            Route("/console/api/letters/{seq:int}/retry", self.retry, methods=["POST"]),
            Route("/console/api/workers/{worker}/drain", self.drain, methods=["POST"]),
            Route("/console/api/workers/{worker}/kill", self.kill, methods=["POST"]),
        ]

    async def drop(self, request: Request) -> Response:
        """Forget a dead letter. Raises NotDone if it is gone."""
        await self._guard.check_admin(request.headers)
        seq = request.path_params["seq"]
        if not await self._messaging.delete_message(self._names.stream("DLQ"), seq):
            raise NotDone(f"there is no dead letter {seq} any more")
        announce(self._messaging, self._names, "console dlq drop", letters=[seq])
        return _done(f"dead letter {seq} dropped")

    async def retry(self, request: Request) -> Response:
        """Run the request of a dead letter once more, and drop the letter if it is answered. Raises NotDone."""
        await self._guard.check_admin(request.headers)
        seq = request.path_params["seq"]
        try:
            letter = await find_letter(self._messaging, self._names, str(seq))
            if letter.request is None:
                raise NotDone(f"{seq} is {letter.reason}, no request: there is nothing to run")
            ran = await run_again(self._messaging, self._names, letter.request.envelope)
        except CommandError as error:
            raise NotDone(str(error)) from error
        dropped = await self._messaging.delete_message(self._names.stream("DLQ"), seq)
        announce(self._messaging, self._names, "console dlq retry", letter=seq, retried_as=ran, dropped=dropped)
        return _done(f"answered as {ran}; dead letter {seq} dropped")

    async def drain(self, request: Request) -> Response:
        """Have a worker finish or hand over its runs and leave. Raises NotDone."""
        await self._guard.check_admin(request.headers)
        try:
            worker, _ = await tell_worker(
                self._messaging, self._names, request.path_params["worker"], Drain(), timeout_s=_ANSWER_S
            )
        except CommandError as error:
            raise NotDone(str(error)) from error
        announce(self._messaging, self._names, "console worker drain", worker=worker)
        return _done(f"worker {worker} drains")

    async def kill(self, request: Request) -> Response:
        """Kill a worker of this machine (SIGKILL). Raises Forbidden where this is not meant for it, NotDone elsewhere."""
        await self._guard.check_admin(request.headers)
        if not self._may_kill:
            raise Forbidden("this console kills no workers: it is not that of a development deployment", code="no_kills")
        member = await self._member(request)
        if not member.pid or not member.machine or member.machine != machine_id():
            raise NotDone(f"worker {member.worker} runs on {member.host or 'another machine'}, out of this console's reach")
        try:
            os.kill(member.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError) as error:
            raise NotDone(f"worker {member.worker} (pid {member.pid}) cannot be killed: {error.strerror}") from error
        announce(self._messaging, self._names, "console worker kill", worker=member.worker)
        return _done(f"worker {member.worker} (pid {member.pid}) killed")

    async def _member(self, request: Request) -> WorkerMember:
        try:
            return find_worker(request.path_params["worker"], await live_workers(self._messaging, self._names))
        except CommandError as error:
            raise BadRequest(str(error), param="worker", code="unknown_worker") from error


def _done(message: str) -> Response:
    return Response(msgspec.json.encode({"message": message}), media_type="application/json")


PAGE = 50
MOST_ID = 160
_UNSHOWN = frozenset({"hashes", "prefill", "v"})


class RequestRoutes:
    def __init__(self, messaging: Messaging, names: Subjects, readers: Readers, guard: ConsoleGuard) -> None:
        self._messaging = messaging
        self._names = names
        self._readers = readers
        self._guard = guard

    def routes(self) -> list[Route]:
        return [
            Route("/console/api/requests", self.listing),
            Route("/console/api/requests/{id}", self.story),
        ]

    async def listing(self, request: Request) -> Response:
        """Return a page of placements, the newest first; `before` is the number of the last one of the page before."""
        await self._guard.check_reader(request.headers)
        text = request.query_params.get("before")
        if text is not None and not (text.isdecimal() and len(text) < 20 and int(text)):
            raise BadRequest(f"before must be the number of a placement, got {text[:40]!r}", param="before", code="bad_cursor")
        found = await self._readers.placements(PAGE, int(text) if text else None)
        rows = [{"number": number, **placement_row(one)} for number, one in found]
        return _json({"placements": rows, "before": rows[-1]["number"] if len(rows) == PAGE else None})

    async def story(self, request: Request) -> Response:
        """Return what the frontends, the routers and the stored placements tell of a request. Raises RequestUnknown."""
        await self._guard.check_reader(request.headers)
        wanted = request_id(request.path_params["id"])
        if len(wanted) > MOST_ID:
            raise RequestUnknown(f"no request has an id of {len(wanted)} characters")
        frontends = [self._names.judge(one.ingress) for one in await live_ingresses(self._messaging, self._names)]
        routers = [one.router for one in await live_routers(self._messaging, self._names)]
        told, known = await asyncio.gather(
            ask_subjects(self._messaging, frontends, TellStories(name=wanted), Stories),
            ask_all(self._messaging, self._names, routers, Explain(id=wanted), Explanation),
        )
        stories = sorted((story for one in told if one for story in one.stories), key=lambda story: story.submitted)
        decided = chronology(one for one in known if one is not None and one.known)
        records = [] if stories else await recorded_placements(self._messaging, self._names, wanted)
        if not (stories or records or decided):
            raise RequestUnknown(
                f"no frontend remembers a request {wanted!r}, and no placement of it is on record: frontends keep their last "
                "4096 requests, records of placements two days"
            )
        data: dict[str, Any] = {**story_data(stories, decided, records), "silent": told.count(None)}
        data["decided"] = [msgspec.to_builtins(one) for one in decided]
        return _json(data)


def placement_row(one: Routed) -> dict[str, Any]:
    """Return a placement without the fields that only a replay uses."""
    return {name: value for name, value in msgspec.structs.asdict(one).items() if name not in _UNSHOWN}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})


_BEARER = "bearer "


class StreamMetrics:
    """The endpoint. Each scrape reads the streams anew."""

    def __init__(self, readers: Readers, guard: ConsoleGuard) -> None:
        self._readers = readers
        self._guard = guard

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.scrape)]

    async def scrape(self, request: Request) -> Response:
        """Return the metrics. Prometheus gives the key, where one is needed, as a bearer token."""
        given = request.headers.get("authorization", "")
        key = given[len(_BEARER) :] if given.lower().startswith(_BEARER) else ""
        await self._guard.check_reader({KEY_HEADER: key} if key else request.headers)
        return Response(exposition(await self._readers.stream_states()), headers={"content-type": CONTENT_TYPE_LATEST})
