"""Parts of a stream that are written past the layers of the server: the same bytes, and only where that is allowed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import httptools
import pytest

from headrace.frontend.http.client_connection import ClientConnection, body_parser, take_host_of_target
from headrace.frontend.http.connections import Connections
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings


class Cycle:
    """An answer on its way, as uvicorn keeps it."""

    def __init__(self, **changes: Any) -> None:
        self.chunked_encoding: bool | None = True
        self.response_started = self.response_complete = self.disconnected = False
        self.keep_alive = self.waiting_for_100_continue = True
        self.default_headers = [(b"date", b"now"), (b"server", b"uvicorn")]
        self.message_event = asyncio.Event()
        self.ended = 0
        self.__dict__.update(changes)

    def on_response(self) -> None:
        self.ended += 1


class Flow:
    def __init__(self) -> None:
        self.write_paused = self.read_paused = False

    def resume_reading(self) -> None:
        self.read_paused = False


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def connection(**changes: Any) -> ClientConnection:
    made = ClientConnection.__new__(ClientConnection)
    made.cycle, made.flow, made.transport = Cycle(**changes), Flow(), Transport()  # type: ignore[assignment]
    made.pipeline = deque()
    made.board = Connections(FrontendSettings(), Metrics())
    return made


def written(of: ClientConnection) -> list[bytes]:
    return of.transport.written  # type: ignore[attr-defined, no-any-return]


def test_a_part_is_one_chunk_of_http() -> None:
    wire = connection()
    assert wire.push(b"data: x" * 4)
    assert written(wire) == [b"1c\r\n" + b"data: x" * 4 + b"\r\n"]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "chunked_encoding": None
        },  # nothing was sent of this answer yet: another request waits behind the one that is answered
        {"chunked_encoding": False},
        {"response_complete": True},
        {"disconnected": True},
    ],
)
def test_nothing_is_written_where_it_is_not_allowed(changes: dict[str, Any]) -> None:
    wire = connection(**changes)
    assert not wire.push(b"x")
    assert written(wire) == []


@pytest.mark.parametrize("changes", [{"response_started": True}, {"disconnected": True}, {"keep_alive": False}])
def test_no_head_is_written_where_it_is_not_allowed(changes: dict[str, Any]) -> None:
    wire = connection(**changes)
    assert not wire.begin(b"", b"x")
    assert written(wire) == []


HEAD = b"HTTP/1.1 200 OK\r\ndate: now\r\nserver: uvicorn\r\ntransfer-encoding: chunked\r\na: b\r\n\r\n"


def test_an_answer_that_is_complete_at_once_leaves_in_one_write_and_frees_the_connection() -> None:
    wire = connection(chunked_encoding=None)
    assert wire.finish(b"data: x", b"a: b\r\n")
    assert written(wire) == [HEAD + b"7\r\ndata: x\r\n0\r\n\r\n"]
    cycle: Any = wire.cycle
    assert (cycle.response_started, cycle.response_complete, cycle.waiting_for_100_continue) == (True, True, False)
    assert (cycle.message_event.is_set(), cycle.ended) == (True, 1)
    assert not wire.finish(b"data: y", b"a: b\r\n"), "it has ended"


def test_the_end_of_a_stream_that_has_begun_has_no_second_head() -> None:
    wire = connection(chunked_encoding=None)
    assert wire.begin(b"a: b\r\n", b"data: x")
    assert wire.finish(b"data: z")
    assert b"".join(written(wire)) == HEAD + b"7\r\ndata: x\r\n7\r\ndata: z\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        (b"a: b\r\n", {"response_started": True}),
        (b"", {"chunked_encoding": None}),
        (b"", {"chunked_encoding": False}),
        (b"", {"response_complete": True}),
        (b"", {"disconnected": True}),
        (b"", {"keep_alive": False}),
    ],
)
def test_no_end_is_written_where_it_is_not_allowed(head: bytes, changes: dict[str, Any]) -> None:
    wire = connection(**changes)
    assert not wire.finish(b"x", head)
    assert written(wire) == []


def asked(**changes: Any) -> ClientConnection:
    """Return a connection whose request has arrived with its whole body."""
    wire = connection(**{"body": bytearray(b"{}"), "more_body": False, "waiting_for_100_continue": False, **changes})
    wire.cycle.message_event.set()
    return wire


def test_a_body_that_is_here_is_taken_once_and_the_client_may_send_more() -> None:
    wire = asked()
    wire.flow.read_paused = True
    assert wire.arrived_body(2) == b"{}"
    assert (bytes(wire.cycle.body), wire.cycle.message_event.is_set()) == (b"", False), "only a disconnect is received now"
    assert not wire.flow.read_paused


@pytest.mark.parametrize(
    "changes",
    [
        {"more_body": True},
        {"waiting_for_100_continue": True},
        {"disconnected": True},
        {"response_complete": True},
        {"body": bytearray(b"too long")},
    ],
)
def test_a_body_that_needs_more_than_taking_is_left_to_the_server(changes: dict[str, Any]) -> None:
    wire = asked(**changes)
    before = bytes(wire.cycle.body)
    assert wire.arrived_body(2) is None
    assert (bytes(wire.cycle.body), wire.cycle.message_event.is_set()) == (before, True)


class Pushed:
    """A connection that takes what the test wants."""

    full = lost = False
    whole = True
    watcher: Any = None

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes
        self.pushed: list[bytes] = []

    def push(self, data: bytes) -> bool:
        self.pushed.append(data)
        return self.takes

    def finish(self, data: bytes, head: bytes = b"") -> bool:
        self.finished = (data, head)
        return self.takes

    def cut(self, last_words: bytes) -> None:
        raise AssertionError("nobody asked for that")


@pytest.mark.parametrize("takes", [True, False])
async def test_what_the_connection_does_not_take_goes_the_usual_way_and_so_does_the_end(*, takes: bool) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append((message["body"], message["more_body"]))

    async def receive() -> Any:
        raise AssertionError("nothing is to be read")

    wire = Pushed(takes=takes)
    exchange = HttpExchange({"headers": [], "headrace.connection": wire}, receive, send)
    exchange.started = True
    await exchange.send_events(b"one")
    await exchange.send_events(b"two", more=False)
    assert wire.pushed == [b"one"]
    assert sent == ([] if takes else [(b"one", True)]) + [(b"two", False)]


@pytest.mark.parametrize("takes", [True, False])
async def test_a_stream_that_is_complete_at_once_goes_with_its_head_to_the_connection_or_the_usual_way(*, takes: bool) -> None:
    sent: list[Any] = []
    headers: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        headers.extend(message.get("headers", ()))

    async def receive() -> Any:
        raise AssertionError("nothing is to be read")

    wire = Pushed(takes=takes)
    scope = {"headers": [], "headrace.connection": wire, "headrace.request_id": "r1"}
    exchange = HttpExchange(scope, receive, send)
    exchange.more_headers = [(b"x-more", b"1")]
    exchange.rate_lines = b"x-left: 2\r\nx-most: 3\r\n"
    await exchange.end_stream(b"all")
    data, head = wire.finished
    assert data == b"all"
    assert b"content-type: text/event-stream" in head
    assert b"x-request-id: r1\r\n" in head
    assert b"\r\nx-left: 2\r\nx-most: 3\r\nx-more: 1\r\n" in head
    assert takes or {(b"x-left", b"2"), (b"x-most", b"3"), (b"x-more", b"1")} <= set(headers)
    assert sent == ([] if takes else ["http.response.start", "http.response.body"])
    assert (exchange.started, scope["headrace.status"]) == (True, 200)


BEHIND = b"GET /next HTTP/1.1\r\nhost: b\r\n\r\n"


class Heard:
    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.headers = list(headers)
        self.events: list[Any] = []

    def on_message_begin(self) -> None:
        self.events.append("begin")

    def on_url(self, url: bytes) -> None:
        self.events.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.events.append((name, value))

    def on_headers_complete(self) -> None:
        self.events.append("head")

    def on_body(self, body: bytes) -> None:
        self.events.append(body)

    def on_message_complete(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize(
    ("header", "body"),
    [((b"content-length", b"5"), b"hello"), ((b"transfer-encoding", b"chunked"), b"5\r\nhello\r\n0\r\n\r\n")],
)
def test_a_body_is_heard_without_a_head_and_what_follows_as_a_request(header: tuple[bytes, bytes], body: bytes) -> None:
    heard = Heard((b"host", b"a"), header)
    parser = body_parser(heard)
    assert parser is not None
    assert heard.events == []
    parser.feed_data(body[:3])
    parser.feed_data(body[3:] + BEHIND)
    end = heard.events.index("end")
    assert b"".join(heard.events[:end]) == b"hello"
    assert heard.events[end + 1 :] == ["begin", b"/next", (b"host", b"b"), "head", "end"]


@pytest.mark.parametrize("headers", [(), ((b"content-length", b"0"),), ((b"content-length", b"000"),), ((b"te", b"chunked"),)])
def test_without_a_body_there_is_no_such_parser(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    assert body_parser(Heard(*headers)) is None


@pytest.mark.parametrize(
    "headers",
    [
        ((b"transfer-encoding", b"gzip"),),
        ((b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"identity")),
        ((b"transfer-encoding", b"chunked"), (b"content-length", b"5")),
        ((b"content-length", b"5"), (b"content-length", b"5")),
    ],
)
def test_a_body_of_two_lengths_is_refused(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    with pytest.raises(httptools.HttpParserError):
        body_parser(Heard(*headers))


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"http://a/x", b"a"),
        (b"http://a:81/x?y", b"a:81"),
        (b"http://[::1]:81/x", b"[::1]:81"),
        (b"https://user@a/x", b"a"),
        (b"*", b"b"),
    ],
)
def test_the_host_of_a_target_takes_the_place_of_the_header(target: bytes, host: bytes) -> None:
    headers = [(b"accept", b"b"), (b"host", b"b")]
    take_host_of_target(target, headers)
    assert headers == [(b"accept", b"b"), (b"host", host)]
