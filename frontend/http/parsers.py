"""Parsers of requests that stay with HTTP/1.1 behind a head that offers another protocol (`Upgrade`).

This server takes no such offer, and RFC 9110 then has the request answered as if there were none. httptools ends it with its
head instead, and reads its body as the next request of the connection, which is a way to smuggle one past a proxy.
Clients of the JDK make the offer with every request (Kludex/uvicorn#2722).
"""

from __future__ import annotations

from typing import Protocol

import httptools

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
