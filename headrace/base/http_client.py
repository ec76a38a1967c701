"""HTTP requests, each over a connection of its own: without proxies, redirects, or decoding of bodies.

The protocol is httpcore's. The network back end connects where the caller says, so that a name that was resolved and checked
is not resolved again, and it raises the errors of the operating system.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpcore2

_PORTS = {"http": 80, "https": 443}
_CHUNK = 64 * 1024
_MOST_HEAD = 96 * 1024  # bytes before the body, informational answers included: less than h11 keeps of one head
_FAIR = 64  # pieces of a body between two turns of other tasks: a server may send one byte in each


class NoConnection(OSError):
    """No connection was made: nothing was sent. The cause is the error of the system or of TLS."""


class BadAnswer(OSError):
    """The answer is not HTTP, or ends before it is complete."""


class BodyTooLong(OSError):
    """The body is longer than the caller reads."""


class Answer:
    """An answer whose body has not been read. Names of headers are in lower case."""

    def __init__(self, response: httpcore2.Response) -> None:
        self.status = response.status
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        self._stream = response.aiter_stream()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises OSError."""
        number = 0
        with _as_os_errors():
            async for piece in self._stream:
                yield piece
                number += 1
                if number % _FAIR == 0:
                    await asyncio.sleep(0)

    async def body(self, most: int, *, start: int = 0, check: Callable[[bytes], object] = len) -> bytes:
        """Return the body. Raises OSError; BodyTooLong at once if its announced length exceeds `most` bytes.

        `check` gets the first `start` bytes, or a few more, as soon as they are there, and may raise.
        """
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            raise BodyTooLong(f"it has {announced[:20]} bytes; at most {most} are taken")
        parts, size = [], 0
        async for piece in self.pieces():
            size += len(piece)
            if size > most:
                raise BodyTooLong(f"it has more than the {most} bytes that are taken")
            parts.append(piece)
            if size - len(piece) < start <= size:
                check(b"".join(parts))
        return b"".join(parts)


@asynccontextmanager
async def ask(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    address: str = "",
    connect_s: float | None = None,
    silent_s: float | None = None,
) -> AsyncIterator[Answer]:
    """Send a request and read the head of its answer. Leaving the block closes the connection.

    `address`: connect to this one instead of resolving the host; with `tls` the certificate must still be the host's.
    `silent_s` bounds each wait for bytes; the caller bounds the whole. Raises OSError, NoConnection if nothing was sent, and
    ValueError for a URL or header that cannot be sent.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{url[:200]!r} is not an address of http or https")
    port = parts.port or _PORTS[parts.scheme]
    host = parts.hostname
    if parts.scheme == "https" and tls is None:
        tls = await asyncio.to_thread(ssl.create_default_context)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    sent = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "headrace", "Connection": "close", **(headers or {})}
    if body is not None:
        sent["Content-Length"] = str(len(body))
    request = httpcore2.Request(
        method,
        # the scheme of the connection under it: TLS is the back end's
        httpcore2.URL(scheme=b"http", host=host.encode("idna"), port=port, target=target.encode("ascii")),
        headers=[(name.encode("ascii"), value.encode("latin-1")) for name, value in sent.items()],
        content=body,
        extensions={"timeout": {"read": silent_s, "write": silent_s, "connect": connect_s}},
    )
    network = _Network(address or host, tls if parts.scheme == "https" else None, host)
    async with httpcore2.AsyncHTTPConnection(request.url.origin, network_backend=network) as connection:
        with _as_os_errors():
            response = await connection.handle_async_request(request)
        network.head_left = None
        yield Answer(response)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except httpcore2.RemoteProtocolError as error:
        raise BadAnswer(str(error)) from None
    except httpcore2.LocalProtocolError as error:
        raise ValueError(str(error)) from None


class _Network(httpcore2.AsyncNetworkBackend):
    """Connects to one address, with TLS under the name of the host."""

    def __init__(self, address: str, tls: ssl.SSLContext | None, host: str) -> None:
        self._address = address
        self._tls = tls
        self._host = host if tls is not None else None
        self.head_left: int | None = _MOST_HEAD  # None from the body on

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # of httpcore's interface
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection(
                    self._address, port, ssl=self._tls, server_hostname=self._host, limit=_CHUNK
                )
        except (OSError, UnicodeError) as error:
            raise NoConnection(str(error) or type(error).__name__) from error
        return _Stream(self, reader, writer)


class _Stream(httpcore2.AsyncNetworkStream):
    def __init__(self, network: _Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._network = network
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        async with asyncio.timeout(timeout):
            data = await self._reader.read(max_bytes)
        if self._network.head_left is not None:
            self._network.head_left -= len(data)
            if self._network.head_left < 0:
                raise BadAnswer("its headers do not end")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        async with asyncio.timeout(timeout):
            self._writer.write(buffer)
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.transport.abort()  # a graceful close could block forever

    def get_extra_info(self, info: str) -> Any:
        return None
