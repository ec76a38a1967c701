"""Passes the playground's chats on to a frontend, whose address a page of the console could not call by itself.

Only two routes are reached this way. The API key of the frontend, where it asks for one, comes from the page with each request
and is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.console.guard import ConsoleGuard
from headrace.frontend.errors import BodyTooLarge, FrontendError, MediaTypeRefused

MOST_BODY = 32 * 1024 * 1024
ANSWER_S = 120.0  # for the head of an answer, and between two pieces of it
_HEAD = 64 * 1024
_PIECE = 64 * 1024
_PASSED_ON = ("content-type", "x-request-id", "x-headrace-decision")
JSON = "application/json"
# A time-out is an OSError.
_NO_ANSWER = (OSError, ValueError, LookupError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class NoFrontend(FrontendError, status=502, code="no_frontend", retriable=True):
    """The frontend cannot be reached, or gave no answer."""


class FrontendProxy:
    """The endpoints below `/console/api/chat`."""

    def __init__(self, url: str, guard: ConsoleGuard) -> None:
        """`url` is the base URL of a frontend, empty if none is known."""
        self.url = url.rstrip("/")
        self._guard = guard

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [
            Route("/console/api/chat", self.chat, methods=["POST"]),
            Route("/console/api/chat/models", self.models),
        ]

    async def models(self, request: Request) -> Response:
        """Return the frontend's `/v1/models`."""
        await self._guard.check_reader(request.headers)
        return await self._forward("GET", "/v1/models", request.headers)

    async def chat(self, request: Request) -> Response:
        """Return the frontend's answer to a chat as it arrives. When the page goes, its connection is closed, which cancels."""
        await self._guard.check_reader(request.headers)
        if request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
            raise MediaTypeRefused(f"a chat is {JSON}")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY:
                raise BodyTooLarge(f"the body has more than {MOST_BODY} bytes")
        return await self._forward("POST", "/v1/chat/completions", request.headers, bytes(body))

    async def _forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Response:
        if not self.url:
            raise NoFrontend("this console knows no frontend: start it with --frontend URL")
        address = urlsplit(self.url)
        tls = ssl.create_default_context() if address.scheme == "https" else None
        port = address.port or (443 if tls else 80)
        writer = None
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection(address.hostname, port, ssl=tls, limit=_HEAD)
                writer.write(_head(method, path, address.netloc, headers, len(body)) + body)
                await writer.drain()
                status, told = _parsed(await reader.readuntil(b"\r\n\r\n"))
        except _NO_ANSWER as error:
            if writer is not None:
                writer.close()
            raise NoFrontend(f"the frontend at {self.url} gave no answer: {type(error).__name__}: {error}") from None
        passed = {name: told[name] for name in _PASSED_ON if name in told}
        passed["cache-control"] = "no-store"
        return StreamingResponse(_pieces(reader, writer), status_code=status, headers=passed)


async def _pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[bytes]:
    try:
        while True:
            async with asyncio.timeout(ANSWER_S):
                piece = await reader.read(_PIECE)
            if not piece:
                return
            yield piece
    finally:
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await writer.wait_closed()


def _head(method: str, path: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    """Return a request of HTTP/1.0: the answer ends with the connection, so that it is passed on as it comes."""
    lines = [f"{method} {path} HTTP/1.0", f"Host: {host}", "X-Headrace-Explain: 1"]
    if key := headers.get("authorization", ""):
        lines.append(f"Authorization: {key}")
    if method == "POST":
        lines += [f"Content-Type: {JSON}", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(first.split(" ", 2)[1]), headers
