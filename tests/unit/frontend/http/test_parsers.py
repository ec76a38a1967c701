"""A parser that begins with a body: what it hears of it, and of the requests behind it."""

from __future__ import annotations

from typing import Any

import httptools
import pytest

from headrace.frontend.http.parsers import body_parser, take_host_of_target

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
