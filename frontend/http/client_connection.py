"""HTTP/1.1 on a single client connection: bounds what uvicorn leaves open, and writes streams past its layers.

uvicorn's protocol leaves limits to a proxy in front of it: headers and request lines may have any size, and all pipelined
requests of one read are accepted at once. Data that arrives on many connections at the same time is processed over several
iterations of the event loop (`headrace.frontend.http.loop`).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace.frontend.errors import (
    FrontendError,
    HeadersTimeout,
    HeadersTooLarge,
    MethodNotAllowed,
    TooManyConnections,
    UrlTooLong,
)
from headrace.frontend.http.bodies import BodyBudget, BodyShare
from headrace.frontend.http.loop import LoopBudget
from headrace.frontend.settings import FrontendSettings

# Parsers of requests that stay with HTTP/1.1 behind a head that offers another protocol (`Upgrade`).
#
# This server takes no such offer, and RFC 9110 then has the request answered as if there were none. httptools ends it with
# its head instead, and reads its body as the next request of the connection, which is a way to smuggle one past a proxy.
# Clients of the JDK make the offer with every request (Kludex/uvicorn#2722).

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Listener(Protocol):
    """An object that hears what a parser finds."""

    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def new_parser(listener: Listener | _BehindHead) -> httptools.HttpRequestParser:
    """Return a parser that begins with a head. It reads on behind a request that ends the connection, as uvicorn's does."""
    parser = httptools.HttpRequestParser(listener)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def body_parser(listener: Listener) -> httptools.HttpRequestParser | None:
    """Return a parser that begins with the body of the request whose head `listener` has heard; None if there is no body.

    Raises httptools.HttpParserError if the head does not say in one way where the body ends.
    """
    framing = [(name, value) for name, value in listener.headers if name in _FRAMING]
    if not any(name != b"content-length" or value.strip(b"0 \t") for name, value in framing):
        return None
    behind = _BehindHead(listener)
    parser = new_parser(behind)
    parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing))
    behind.heard = True
    return parser


def take_host_of_target(url: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Put the host of an absolute target (`GET http://host/path`) in place of that in `Host`, which RFC 9112 has ignored then.

    Otherwise a proxy that goes by the target and this server would take the request for one to different hosts.
    Raises httptools.HttpParserError for a target that is no URL.
    """
    target = httptools.parse_url(url)
    if target.host is None:
        return
    host = b"[%b]" % target.host if b":" in target.host else target.host
    authority = host if target.port is None else b"%b:%d" % (host, target.port)
    headers[:] = [(name, authority if name == b"host" else value) for name, value in headers]


class _BehindHead:
    """A listener's callbacks, without those of the head that tells a parser how the body is framed."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.heard = False
        self.on_body = listener.on_body
        self.on_message_complete = listener.on_message_complete

    def on_message_begin(self) -> None:
        if self.heard:
            self._listener.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.heard:
            self._listener.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.heard:
            self._listener.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.heard:
            self._listener.on_headers_complete()


# uvicorn would log a line per malformed request, with which clients could fill the log. The metric counts them instead.
_quiet = logging.getLogger("frontend.connections")
_quiet.setLevel(logging.ERROR)

MAX_HEADERS = 128
MAX_URL = 16 * 1024
_HEAD_BYTES = 16 * 1024  # of a request's head, parsed at a time, so that a head over the limit is refused before its end


class Watcher(Protocol):
    """An observer that is called when the client of a connection leaves."""

    def left(self) -> None:
        """Note that the client has closed the connection."""


class Board(Protocol):
    """Limits that all client connections share (`headrace.frontend.http.connections.Connections`)."""

    settings: FrontendSettings
    bodies: BodyBudget

    def stream_head(self, default_headers: list[tuple[bytes, bytes]]) -> bytes: ...
    def loop_budget(self, loop: asyncio.AbstractEventLoop) -> LoopBudget: ...
    def refused(self, code: str) -> None: ...
    def admit(self, connection: ClientConnection) -> bool: ...


class ClientConnection(HttpToolsProtocol):
    """A client connection. `waits_since`: the loop's time since when the client has owed `owes`; None = nothing is due."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.board: Board
        self.logger = _quiet
        self.waits_since: float | None = None
        self.owes = "headers"
        self.idle_since: float | None = None  # None while a request is open
        self.full_since: float | None = None  # None while the client takes what it is sent
        self._head = 0  # bytes read of a head that is not complete
        self._read = 0  # bytes of the last read
        self._idle = 0  # bytes read of a body since its last content: extensions of chunks, trailers
        self._body_parser: httptools.HttpRequestParser | None = None  # of a request that offers another protocol
        self._begun = 0  # requests so far
        self._in_head = False
        self._in_message = False
        self._refusal: FrontendError | None = None
        self._late: list[bytes] = []  # read, but not parsed yet
        self.lost = False
        self.watcher: Watcher | None = None  # called when the client leaves

    # -- asyncio.Protocol ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self.waits_since = self.idle_since = now
        if not self.board.admit(self):
            self.refuse(TooManyConnections(retry_after_s=1.0))

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        budget = self.board.loop_budget(self.loop)
        if self._late or budget.is_spent():
            if not self._late:
                budget.defer(self._parse_late)
            self._late.append(data)
            self.transport.pause_reading()
        else:
            self._parse_read(data)

    def _parse_late(self) -> None:
        late, self._late = self._late, []
        for data in late:
            self._parse_read(data)
        if not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        if self._answering:
            self.cycle.disconnected = True  # nothing more is written, even if the task learns of it later
        budget = self.board.loop_budget(self.loop)
        if budget.is_spent():
            budget.defer(partial(self._lose, exc))
        else:
            self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        if self.watcher is not None:
            self.watcher.left()

    def _parse_read(self, data: bytes) -> None:
        """Feed the parser with one read: a body as a whole, heads in pieces."""
        if len(data) <= _HEAD_BYTES:
            self._parse(data)
            return
        at = 0
        while at < len(data):
            end = len(data) if self._in_message and not self._in_head else at + _HEAD_BYTES
            self._parse(data[at:end])
            at = end

    def _parse(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        begun, outside = self._begun, not self._in_message
        self._read = len(data)
        if not outside and not self._in_head:
            self._idle += len(data)
        self._feed(data)
        if self._in_head:
            # bytes before this head in the same read belong to another request
            self._head += len(data) if self._begun == begun + outside else 0
            if self.waits_since is None:
                self.waits_since, self.owes = self.loop.time(), "headers"
            if len(self.url) > MAX_URL:
                self.refuse(UrlTooLong(f"the URL has more than {MAX_URL} bytes"))
            elif self._head > self.board.settings.max_header_bytes:
                self.refuse(HeadersTooLarge(f"the headers have more than {self.board.settings.max_header_bytes} bytes"))
        elif self._idle > self.board.settings.max_header_bytes and self._in_message:
            self.refuse(HeadersTooLarge(f"{self._idle} bytes of the body are no content"))
        elif self.waits_since is None and not self._in_message and not self._answering:  # only line ends so far, no request
            self.waits_since, self.owes = self.loop.time(), "headers"

    def _feed(self, data: bytes) -> None:
        """Feed the parser as uvicorn does, and go on with HTTP/1.1 where a request offers another protocol."""
        self._unset_keepalive_if_required()
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    self.parser, self._body_parser = self._body_parser or new_parser(self), None
                    data = data[offer.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refused. While an answer is being sent, close the connection without one."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            self.refuse(refusal)
        elif self._answering:
            self.transport.close()
        else:
            self.board.refused("malformed")
            super().send_400_response(msg)

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, although uvicorn's types say otherwise
        return cycle is not None and not cycle.response_complete

    def refuse(self, error: FrontendError) -> None:
        """Send the error, unless an answer is being sent, and close the connection."""
        self.board.refused(error.code or "refused")
        if not self._answering and not self.transport.is_closing():
            body = error.body()
            lines = [
                b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode()),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
                *(name + b": " + value for name, value in error.headers()),
            ]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()
        self.waits_since, self.owes = self.loop.time(), "end"

    def refuse_late_headers(self, limit_s: float) -> bool:
        """Refuse a head that has begun and not ended in this time. Returns False if no head has begun."""
        if self._in_head:
            self.refuse(HeadersTimeout(f"the headers did not arrive within {limit_s:g} s"))
        return self._in_head

    @property
    def whole(self) -> bool:
        """Return True if every request that has begun on this connection has arrived with its whole body."""
        return not self._in_message

    @property
    def peer(self) -> str:
        """The address of the client; empty for a local socket."""
        client = self.client
        return str(client[0]) if client else ""

    @property
    def half_head(self) -> bool:
        """True while a head has begun and not ended, or none has begun on a new connection, and no answer is being sent."""
        return self._in_head and not self._answering

    def body_share(self) -> BodyShare:
        """Return the part of this connection's body in the memory of all that are still arriving."""
        return self.board.bodies.share(self.peer)

    def arrived_body(self, most: int) -> bytes | None:
        """Take the body of the request that is answered now, past the layers of the server, if it is here as a whole.

        Returns None if the caller has to receive it through ASGI: some of it, or another request behind it, is still to come,
        or it has more than `most` bytes.
        """
        cycle: RequestResponseCycle = self.cycle
        if self.pipeline or cycle.more_body or cycle.disconnected or cycle.response_complete or cycle.waiting_for_100_continue:
            return None
        if len(cycle.body) > most:
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        self.flow.resume_reading()
        return body

    @property
    def full(self) -> bool:
        """Return True if the client does not read and the write buffer is full."""
        return self.flow.write_paused

    def begin(self, head: bytes, data: bytes) -> bool:
        """Write the head of a streamed answer of status 200 and its first part. `head`: valid headers, with line ends.

        Returns False if nothing was written and the caller has to send through ASGI.
        """
        cycle: RequestResponseCycle = self.cycle
        if self.pipeline or cycle.response_started or cycle.disconnected or not cycle.keep_alive or self.flow.write_paused:
            return False  # with a pipeline, the cycle belongs to another request
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        self.transport.write(b"%b%b\r\n%x\r\n%b\r\n" % (self.board.stream_head(cycle.default_headers), head, len(data), data))
        return True

    def push(self, data: bytes) -> bool:
        """Write a part of a streamed answer to the transport, past the layers of the server.

        Returns False if nothing was written and the caller has to send through ASGI, because the client does not read or has
        left, or because another request waits behind this one.
        """
        cycle: RequestResponseCycle = self.cycle
        if not data or not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def finish(self, data: bytes, head: bytes = b"") -> bool:
        """Write the last part of a streamed answer and its end, past the layers of the server.

        `head`: of a stream of which nothing was written, as for `begin`. Returns False if nothing was written and the caller
        has to send through ASGI.
        """
        cycle: RequestResponseCycle = self.cycle
        if self.pipeline or cycle.response_complete or cycle.disconnected or not cycle.keep_alive or self.flow.write_paused:
            return False
        if not data or (cycle.response_started if head else not cycle.chunked_encoding):
            return False
        if head:
            cycle.response_started = cycle.chunked_encoding = True
            cycle.waiting_for_100_continue = False
            head = b"%b%b\r\n" % (self.board.stream_head(cycle.default_headers), head)
        self.transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(data), data))
        cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True

    def cut(self, last_words: bytes) -> None:
        """Close the connection of a client that does not read. `last_words` reach it if it reads its backlog soon."""
        cycle: RequestResponseCycle | None = self.cycle
        if not self.transport.is_closing():
            if last_words and cycle is not None and cycle.chunked_encoding and not cycle.response_complete:
                self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last_words), last_words))
            self.transport.close()
        self.waits_since, self.owes = self.loop.time(), "end"

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full_since = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.waits_since, self.owes = self.loop.time(), "end"  # a client that takes nothing keeps a closed connection open

    # -- the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.pipeline and len(self.pipeline) >= self.board.settings.max_pipelined:
            self._stop(TooManyConnections(f"more than {self.board.settings.max_pipelined} requests wait on this connection"))
        super().on_message_begin()
        self.scope["headrace.connection"] = self  # type: ignore[typeddict-unknown-key]
        self.idle_since = None
        self._in_head = self._in_message = True
        self._begun += 1
        self._head = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer is not checked, so it must not look like a header
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if len(self.url) > MAX_URL:
            self._stop(UrlTooLong(f"the URL has more than {MAX_URL} bytes"))
        if len(self.headers) > MAX_HEADERS:
            self._stop(HeadersTooLarge(f"the request has more than {MAX_HEADERS} headers"))
        most = self.board.settings.max_header_bytes
        if self._head + self._read > most and sum(len(name) + len(value) for name, value in self.headers) > most:
            self._stop(HeadersTooLarge(f"the headers have more than {most} bytes"))
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(MethodNotAllowed("this server is no proxy"))
            self._body_parser = body_parser(self)
        if not self.url.startswith(b"/"):
            take_host_of_target(self.url, self.headers)
        self._in_head = False
        self.waits_since = None
        self._idle = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body_parser is not None:
            return  # that was the head's end only
        super().on_message_complete()
        self._in_message = False
        if self.owes == "body":
            self.waits_since = None
            self._rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.waits_since, self.owes = self.loop.time(), "end"
        elif self._in_message and not self._in_head and not self._answering:
            self.waits_since, self.owes = self.loop.time(), "body"  # the rest of the body is due and discarded
        else:
            self._rest()

    def _rest(self) -> None:
        if not self._answering and not self.pipeline and not self._in_message:
            self.idle_since = self.loop.time()

    def _stop(self, error: FrontendError) -> None:
        """Raise the error through the parser, which then stops."""
        self._refusal = error
        raise error
