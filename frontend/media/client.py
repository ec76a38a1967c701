"""An HTTP client for a single GET over one connection to one address, with every size bounded.

It uses asyncio's streams and httptools, which also parses the requests of this server. httpx or aiohttp could do this. But the
connection must go to the address that was checked, under the requested name, and nothing may follow redirects, resolve names
again or decompress bodies by itself. A page of code is safer than a large dependency that is configured to do less.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import httptools

from headrace.frontend.media.addresses import Target
from headrace.frontend.media.sniff import HEAD

MAX_HEAD = 32 * 1024  # bytes of status line and headers
_CHUNK = 64 * 1024


class FetchFailed(Exception):
    """The fetch failed. The message has the reason. `unreachable`: another address may work."""

    unreachable = False


class NoAnswer(FetchFailed):
    """The host has no address, takes no connection, or does not answer in HTTP."""


class Unreachable(NoAnswer):
    """No connection to this address could be made."""

    unreachable = True


class TooLarge(FetchFailed):
    """The body exceeds the limit."""


class FetchedBody:
    """The answer of a server, filled by the parser. `body` is complete once `done`."""

    def __init__(self, limit: int, check_start: Callable[[bytes], None]) -> None:
        self._limit = limit
        self._check_start = check_start
        self._parser = httptools.HttpResponseParser(self)
        self._head = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._framed = False  # headers give the length, so the end of the connection is not the end of the body
        self._checked = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.in_body = False
        self.done = False

    def feed(self, data: bytes) -> None:
        """Parse received data. Raises FetchFailed."""
        if not self.in_body:
            self._head += len(data)
            if self._head > MAX_HEAD + _CHUNK:
                raise NoAnswer("its headers do not end")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None  # the exception of a callback below
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise NoAnswer("its answer is not HTTP") from None

    def end(self) -> None:
        """Handle the end of the connection. Raises FetchFailed if the answer is not complete."""
        if not self.in_body or self._framed:
            why = "it closed the connection before its answer was complete"
            raise FetchFailed(why) if self.in_body else NoAnswer(why)
        self.done = True

    def body(self) -> bytes:
        """Return the body."""
        return b"".join(self._parts)

    def close(self) -> None:
        """Drop the parser. It refers back to this object, so the bytes would otherwise stay until garbage collection."""
        del self._parser

    # -- the parser's callbacks ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= 200 or len(name) + len(value) > MAX_HEAD:
            raise FetchFailed("it sends too many headers")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self.in_body = True
        self._framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self.status != 200:
            self.done = True  # its body is not used
            return
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise FetchFailed(f"it sends content-encoding {encoding[:50]!r} though only identity was asked for")
        length = self.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            raise TooLarge(f"it has {length[:20]} bytes; at most {self._limit} are taken")

    def on_body(self, data: bytes) -> None:
        if self.done or not self.in_body:
            return
        self._size += len(data)
        if self._size > self._limit:
            raise TooLarge(f"it has more than the {self._limit} bytes that are taken")
        self._parts.append(data)
        if not self._checked and self._size >= HEAD:
            self._checked = True
            self._check_start(b"".join(self._parts))

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.done = True


async def get(
    target: Target, address: str, *, tls: ssl.SSLContext | None, limit: int, check_start: Callable[[bytes], None]
) -> FetchedBody:
    """Fetch `target` from `address`. Only the body of a 200 is read.

    With `tls` the certificate must be that of the target's host, for any address. `check_start` gets the first bytes and may
    raise. The caller sets the deadline. Raises FetchFailed.
    """
    try:
        reader, writer = await asyncio.open_connection(
            address,
            target.port,
            ssl=tls,
            server_hostname=target.host if tls is not None else None,
            limit=_CHUNK,
        )
    except ssl.SSLError as error:
        raise Unreachable(f"no trusted connection: {error.reason or error}") from None
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"no connection: {error.__class__.__name__}") from None
    answer = FetchedBody(limit, check_start)
    try:
        writer.write(
            f"GET {target.path} HTTP/1.1\r\nHost: {target.host_header}\r\nUser-Agent: headrace\r\nAccept: */*\r\n"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
        )
        while not answer.done:
            data = await reader.read(_CHUNK)
            if data:
                answer.feed(data)
            else:
                answer.end()
        return answer
    except OSError as error:
        raise NoAnswer(f"the connection broke: {error.__class__.__name__}") from None
    finally:
        answer.close()
        writer.transport.abort()  # a graceful close could block forever
