"""An HTTP exchange on the token path: headers, body within limits, answer, and detection of a client that leaves.

It is plain ASGI instead of Starlette's Request and StreamingResponse. These start a task group and several tasks per answer,
which costs more than all other work of this process for a short answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.broker.jobs import new_id
from headrace.frontend.auth.caller import tenants_salt
from headrace.frontend.auth.gate import REQUEST_ID, tenant_of_scope
from headrace.frontend.auth.quotas import headers_of
from headrace.frontend.errors import (
    BadFraming,
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    ErrorForm,
    FrontendError,
    StatusForm,
    translate,
)
from headrace.frontend.http.bodies import INLINE_BYTES, BodyShare, check_shape
from headrace.frontend.http.loop import forget_frames
from headrace.frontend.settings import FrontendSettings

T = TypeVar("T")

SLOW_CLIENT_S = 60.0  # default

_LARGE = 1 << 20  # bytes; joining fewer takes less time than handing them to a thread
_JSON = (b"content-type", b"application/json")
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells nginx to pass events on at once
]

# The headers of a stream as bytes, with a place for the id of the request.
_SSE_HEAD = b"".join(b"%b: %b\r\n" % header for header in _SSE) + REQUEST_ID + b": %b\r\n"

_PIECE = 256 * 1024  # bytes of an answer handed to the server at a time


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class SlowReader(Exception):
    """The client has read nothing of its answer for too long."""


class Wire(Protocol):
    """The connection under an exchange, if the server has one (`headrace.frontend.http.client_connection.ClientConnection`)."""

    lost: bool
    watcher: Any

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def whole(self) -> bool: ...

    def body_share(self) -> BodyShare: ...
    def arrived_body(self, most: int) -> bytes | None: ...
    @property
    def full(self) -> bool: ...
    def begin(self, head: bytes, data: bytes) -> bool: ...
    def push(self, data: bytes) -> bool: ...
    def finish(self, data: bytes, head: bytes = b"") -> bool: ...
    def cut(self, last_words: bytes) -> None: ...


def shown_id(scope: Scope) -> str:
    """Return the id that a client sees in `x-request-id`: its own, or the request's."""
    return str(scope.get("headrace.client_request_id") or scope["headrace.request_id"])


def log_ids(scope: Scope) -> dict[str, str]:
    """Return the fields by which all log lines name a request: its id, and its client's id for it."""
    ids = {"request_id": scope.get("headrace.request_id", "")}
    if (name := scope.get("headrace.client_request_id")) is not None:
        ids["client_request_id"] = name
    return ids


class HttpExchange:
    """A request and its answer.

    `started` is True once the head of the answer was sent; its status is then in the scope, for the log. `more_headers` are
    added to the head, and so are those of the rate limits, as lines (`rate_lines`); `stream_headers` are those of a stream, of
    server-sent events by default. `asked_bytes` is the size of the body and of stored items that it refers to. `durable`: the
    answer's events will be stored, and the whole answer too.
    `from_publisher`: of a stored job that no frontend has taken from a client.
    """

    durable = False
    from_publisher = False
    job_token = ""  # of the stored job that is planned
    stored_job = ""  # its id inside Headrace

    __slots__ = (
        "_receive",
        "_send",
        "_wire",
        "asked_bytes",
        "body_size",
        "headers",
        "more_headers",
        "push",
        "rate_lines",
        "scope",
        "slow_client_s",
        "started",
        "stream_headers",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        wire: Wire | None = scope.get("headrace.connection")
        self._wire = wire
        self.push = wire.push if wire is not None else _waits  # the connection's own, which is called for every event
        self.slow_client_s = SLOW_CLIENT_S
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = False
        self.body_size = self.asked_bytes = 0
        self.more_headers: list[tuple[bytes, bytes]] = []
        self.rate_lines = b""
        self.stream_headers = _SSE

    def header(self, name: bytes) -> str | None:
        return self.headers[name].decode("latin-1") if name in self.headers else None

    def job_id(self) -> str:
        """Return an id for a job: for the first one that of the request, so that all logs show one id, then new ones."""
        fresh: str | None = self.scope.pop("headrace.fresh_id", None)
        return fresh or new_id()

    def plan_again(self, job_id: str) -> None:
        """Let the next job have the id of the first one, which is not run."""
        self.scope["headrace.fresh_id"] = job_id

    @property
    def created(self) -> int:
        """Return the time of the answer, Unix time."""
        return int(time.time())

    @property
    def tenant(self) -> str:
        return tenant_of_scope(self.scope, self.headers)

    def salt(self, asked: str | None) -> str | None:
        """Return the salt of the prefix cache: the client's, or where tenants are kept apart, one of tenant and client."""
        return tenants_salt(self.tenant, asked) if self.scope.get("headrace.isolated") else asked

    @property
    def name(self) -> str:
        return str(self.scope.get("headrace.client_request_id", ""))

    async def read_body(self, settings: FrontendSettings, *, json: bool = True) -> bytes:
        """Read the body and, if it is to be JSON, check that it is safe to decode.

        Raises BodyTooLarge as soon as the limit is passed, BodiesFull, BodyTimeout, ClientGone, and MalformedBody for values
        that are too deep or too many.
        """
        wire = self._wire
        body = wire.arrived_body(settings.max_body_bytes) if wire is not None else None
        if body is None:  # seldom
            body = await self._arriving_body(settings)
        self.body_size = self.asked_bytes = len(body)
        if json:
            await check_shape(body, settings)
        return body

    async def _arriving_body(self, settings: FrontendSettings) -> bytes:
        limit, wire = settings.max_body_bytes, self._wire
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"the body has {int(declared)} bytes; this server takes at most {limit}")
        if wire is not None and wire.whole:
            return await self._read(limit)
        share = wire.body_share() if wire is not None else None
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                return await self._read(limit, share)
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {settings.body_timeout_s:g} s") from None
        finally:
            if share is not None:
                share.close()

    async def aside(self, work: Callable[[], T]) -> T:
        """Return `work()`, run in a thread if the request is long, so that the event loop stays free."""
        return await asyncio.to_thread(work) if self.asked_bytes > INLINE_BYTES else work()

    async def _read(self, limit: int, share: BodyShare | None = None) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"the body is larger than the {limit} bytes this server takes")
            if share is not None:
                share.add(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                if size > _LARGE:  # in a thread, because the copy releases the interpreter
                    return await asyncio.to_thread(b"".join, parts)
                return parts[0] if len(parts) == 1 else b"".join(parts)

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def send_json(self, body: bytes, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Send a whole JSON answer. Raises SlowReader."""
        await self.send_whole(body, [_JSON, *(headers or ())], status=status)

    async def send_whole(self, body: bytes, headers: list[tuple[bytes, bytes]], *, status: int = 200) -> None:
        """Send a whole answer; its content type is among the headers. Raises SlowReader."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        start = 0
        while len(body) - start > _PIECE:  # so that a slow socket's buffer does not take the whole answer
            await self._write({"type": "http.response.body", "body": body[start : start + _PIECE], "more_body": True})
            start += _PIECE
        await self._write({"type": "http.response.body", "body": body[start:] if start else body, "more_body": False})

    async def send_error(self, error: FrontendError, *, form: ErrorForm = FrontendError.body) -> None:
        """Send an error in place of an answer. Raises SlowReader."""
        headers = error.headers()
        if isinstance(error, (BodyTooLarge, BodyTimeout, BadFraming)):
            headers.append((b"connection", b"close"))  # what follows is not read
        status = form.status(error) if isinstance(form, StatusForm) else error.status
        await self.send_json(form(error), status=status, headers=headers)

    async def start_stream(self, events: bytes = b"") -> None:
        """Send the head of a stream together with its first `events`. Raises SlowReader."""
        if events and self.begin(events):
            return
        await self._start(200, self.stream_headers)
        if events:
            await self.send_events(events)

    async def end_stream(self, events: bytes) -> None:
        """Send the last events and the end of a stream, its head with them if that was not sent yet. Raises SlowReader."""
        wire, started = self._wire, self.started
        direct = bool(events) and (started or self.stream_headers is _SSE)
        if wire is not None and direct and wire.finish(events, b"" if started else self._sse_head()):
            self.started = True
            self.scope["headrace.status"] = 200
            return
        if not started:
            await self._start(200, self.stream_headers)
        await self.send_events(events, more=False)

    def _sse_head(self) -> bytes:
        head = _SSE_HEAD % shown_id(self.scope).encode() + self.rate_lines
        return head + b"".join(b"%b: %b\r\n" % header for header in self.more_headers) if self.more_headers else head

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        scope = self.scope
        scope["headrace.status"] = status
        marked = [*headers, *headers_of(self.rate_lines), *self.more_headers, (REQUEST_ID, shown_id(scope).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": marked})

    def begin(self, events: bytes) -> bool:
        """Send the head of a stream and its first events, without waiting. Returns False if nothing was sent."""
        wire = self._wire
        if self.started or wire is None or self.stream_headers is not _SSE or not wire.begin(self._sse_head(), events):
            return False
        self.started = True
        self.scope["headrace.status"] = 200
        return True

    async def send_events(self, events: bytes, *, more: bool = True) -> None:
        """Send events, behind the head of the stream if that is due, and wait until the socket takes more.

        A slow reader delays only its own stream. Raises SlowReader.
        """
        if not self.started:
            await self.start_stream(events if more else b"")
            if more:
                return
        elif more and self.push(events):
            return
        await self._write({"type": "http.response.body", "body": events, "more_body": more})

    async def _write(self, message: Message) -> None:
        wire = self._wire
        if wire is None or not wire.full:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self.slow_client_s):
                await self._send(message)
        except TimeoutError:
            raise SlowReader from None

    def cut(self, last_words: bytes) -> None:
        """Close the connection of an answer that its client does not read."""
        if self._wire is not None:
            self._wire.cut(last_words)

    def watch(self) -> DisconnectWatch:
        """Return a guard that cancels the work for this exchange if the client leaves."""
        return DisconnectWatch(self._receive, self._wire)


def _waits(_events: bytes) -> bool:
    """Send nothing: a server without a `Wire` may have to wait."""
    return False


class DisconnectWatch:
    """An async context manager that cancels its block when the client leaves, and then raises ClientGone.

    It works like `asyncio.timeout`: the block is cancelled, and the cancellation becomes the exception at the end of the block.
    Call `stop` before the last write, because a complete answer looks like a disconnect, too. A `Wire` reports the disconnect;
    under other servers a task waits for it.
    """

    __slots__ = ("_gone", "_owner", "_receive", "_stopped", "_task", "_wire")

    def __init__(self, receive: Receive, wire: Wire | None = None) -> None:
        self._receive = receive
        self._wire = wire
        self._task: asyncio.Task[None] | None = None
        self._gone = False
        self._stopped = False

    async def __aenter__(self) -> DisconnectWatch:
        wire = self._wire
        # With the loop, because looking the running one up costs a system call on Python 3.11.
        owner = asyncio.current_task(wire.loop if wire is not None else None)
        assert owner is not None  # noqa: S101  # a coroutine always runs in a task
        self._owner = owner
        if wire is None:
            self._task = asyncio.get_running_loop().create_task(self._wait())  # always cancelled by __aexit__
            return self
        wire.watcher = self
        if wire.lost:
            self.left()
        return self

    def left(self) -> None:
        """Cancel the block, because the client has closed the connection."""
        if not self._stopped and not self._gone:
            self._gone = True
            self._owner.cancel()

    async def _wait(self) -> None:
        while True:
            message = await self._receive()
            if self._stopped:
                return
            if message["type"] == "http.disconnect":
                self.left()
                return

    def stop(self) -> None:
        self._stopped = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
        if self._wire is not None and self._wire.watcher is self:
            self._wire.watcher = None
        if self._gone and self._owner.uncancel() <= 0:
            if kind is not asyncio.CancelledError:  # the block ended by itself and the cancellation is still pending
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            raise ClientGone from None


def announced_bytes(request: Request) -> int | None:
    """Return the size of the body, None if the client does not announce it."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


async def body_pieces(request: Request, *, limit: int, stall_s: float) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; while the reader does not ask for more, the client is held up.

    Raises BodyTooLarge (at once if the size is announced), BodyTimeout when nothing arrives for `stall_s`, ClientGone.
    """
    announced = announced_bytes(request)
    if announced is not None and announced > limit:
        raise BodyTooLarge(f"the body has {announced} bytes; this route takes at most {limit}")
    size = 0
    while True:
        try:
            async with asyncio.timeout(stall_s):
                message = await request.receive()
        except TimeoutError:
            raise BodyTimeout(f"no more of the body arrived within {stall_s:g} s, after {size} bytes") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise BodyTooLarge(f"the body is larger than the {limit} bytes this route takes")
        if piece:
            yield piece
        if not message.get("more_body", False):
            return


# An ASGI endpoint for routes that answer without a job, such as counting tokens.

log = structlog.get_logger()

Handler = Callable[[bytes, HttpExchange], Awaitable[bytes]]
"""Takes the body of a request and returns the JSON of the answer."""


def unary_endpoint(handler: Handler, settings: FrontendSettings, *, form: ErrorForm = FrontendError.body) -> ASGIApp:
    """Return the application of one route, with the same limits on bodies as all routes."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            body = await exchange.read_body(settings)
            await exchange.send_json(await handler(body, exchange))
        except ClientGone as gone:
            scope["headrace.outcome"] = "client_gone"
            forget_frames(gone)
        except Exception as error:
            seen = translate(error)
            scope["headrace.outcome"] = seen.code
            if type(seen) is FrontendError:
                log.error("request.crashed", **log_ids(scope), exc_info=error)
            if exchange.started:
                raise
            await exchange.send_error(seen, form=form)
            forget_frames(error)

    return answer


DEFAULT_LIMIT = 20
MAX_LIMIT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """The page that a request asks for. `after` is the id of the object before it."""

    limit: int
    ascending: bool
    after: str | None

    @classmethod
    def of(cls, request: Request, *, ascending: bool = False, most: int = MAX_LIMIT, usual: int = DEFAULT_LIMIT) -> PageQuery:
        """Read a query. `ascending` and `usual` are the order and the limit where none is given. Raises BadRequest."""
        query = request.query_params
        order = query.get("order", "asc" if ascending else "desc")
        if order not in ("asc", "desc"):
            raise BadRequest(f"order must be asc or desc, got {order[:100]!r}", param="order")
        return cls(limit=_limit(query.get("limit"), most, usual), ascending=order == "asc", after=query.get("after"))

    def page(self, objects: Sequence[T], names: Sequence[str]) -> tuple[list[T], bool]:
        """Return the objects of the page and whether more follow. `objects` are in ascending order, `names` are their ids.

        Raises BadRequest if no object has the id in `after`.
        """
        order = list(range(len(objects))) if self.ascending else list(reversed(range(len(objects))))
        if self.after is not None:
            if self.after not in names:
                raise BadRequest(f"after: the list has no object {self.after[:100]!r}", param="after")
            order = order[order.index(names.index(self.after)) + 1 :]
        return [objects[i] for i in order[: self.limit]], len(order) > self.limit


def _limit(value: str | None, most: int, usual: int) -> int:
    if value is None:
        return usual
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= most:
        raise BadRequest(f"limit must be a number from 1 to {most}, got {value[:100]!r}", param="limit")
    return int(value)


async def read_body(request: Request, settings: FrontendSettings) -> bytes:
    """Read the body of a request that Starlette routes, within the limits of all bodies. Raises as `HttpExchange.read_body`."""
    return await HttpExchange(request.scope, request.receive, _nothing).read_body(settings)


async def _nothing(message: Message) -> None:
    """Send nothing: the answer is Starlette's."""
