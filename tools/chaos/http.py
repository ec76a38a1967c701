"""Sends one POST per HTTP/1.1 connection and reports how the exchange ended: complete, cut, or never begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httptools

_READ_BYTES = 65536
_CONNECT_TIMEOUT_S = 10.0


class Cut(Exception):
    """The connection ended before the answer did. `began`: some of the answer had arrived."""

    def __init__(self, why: str, *, began: bool) -> None:
        super().__init__(why)
        self.began = began


class Response:
    """The head of a response, and its body as it arrives."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._reader = reader
        self._parts: list[bytes] = []
        self._head = False
        self._whole = False
        self._parser = httptools.HttpResponseParser(self)

    # callbacks of httptools ----------------------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._head = True

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._whole = True

    # reading -------------------------------------------------------------------------------------------------------------
    async def read_head(self) -> None:
        """Read until the head is complete. Raises Cut."""
        while not self._head:
            await self._feed()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive. Raises Cut."""
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if self._whole and not self._parts:
                return
            await self._feed()

    async def body(self) -> bytes:
        """Return the whole body. Raises Cut."""
        return b"".join([part async for part in self.parts()])

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event. Raises Cut."""
        rest = b""
        async for part in self.parts():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                for line in event.split(b"\n"):
                    if line.startswith(b"data: "):
                        yield line[6:]

    async def _feed(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise Cut(str(error) or type(error).__name__, began=self._head) from None
        if not data:
            raise Cut("the connection was closed", began=self._head)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Cut(f"not HTTP: {error}", began=self._head) from None


@asynccontextmanager
async def post(
    host: str, port: int, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send the request and read the head of the response before the block begins.

    Leaving the block closes the connection, also before the response is complete. Raises Cut, and OSError or TimeoutError if
    no process listens.
    """
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        data = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        head += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join([*head, "Connection: close", "", ""]).encode() + data)
        response = Response(reader)
        await response.read_head()
        yield response
    finally:
        writer.transport.abort()
