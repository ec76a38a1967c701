"""The playground reaches two routes of the frontend and no others, and gets answers as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.keys import KeyRecord
from headrace.console import guard as frontend_proxy
from headrace.console.guard import ConsoleGuard, FrontendProxy
from headrace.frontend.errors import FrontendError
from headrace.frontend.status import error_response

Handler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def no_keys() -> list[KeyRecord]:
    return []


async def failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, FrontendError)
    return error_response(error)


def console(url: str) -> httpx.AsyncClient:
    guard = ConsoleGuard(host="127.0.0.1", key="", private=False, stored=no_keys)
    app = Starlette(routes=FrontendProxy(url, guard).routes(), exception_handlers={FrontendError: failed})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@asynccontextmanager
async def frontend(handler: Handler) -> AsyncIterator[str]:
    """A frontend that answers each request by `handler`, which gets its head."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_chat_is_passed_on_with_its_key_and_its_answer_with_what_the_router_decided() -> None:
    seen: list[bytes] = []

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend((head, await reader.readexactly(2)))
        writer.write(
            b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\nX-Headrace-Decision: {}\r\n"
            b"Set-Cookie: a=b\r\n\r\ndata: 1\n\n"
        )
        writer.write(b"data: 2\n\n")
        await writer.drain()

    async with frontend(answer) as url, console(url) as http:
        headers = {"authorization": "Bearer k", "cookie": "c=d", "content-type": "application/json"}
        told = await http.post("/console/api/chat", content=b"{}", headers=headers)
    assert (told.status_code, told.text) == (200, "data: 1\n\ndata: 2\n\n")
    assert told.headers["x-headrace-decision"] == "{}"
    assert "set-cookie" not in told.headers
    head, body = seen
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in head
    assert b"ookie" not in head
    assert body == b"{}"


async def test_an_error_of_the_frontend_is_passed_on() -> None:
    async def refuse(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.0 401 Unauthorized\r\nContent-Type: application/json\r\n\r\n{"error": {"message": "no key"}}')
        await writer.drain()

    async with frontend(refuse) as url, console(url) as http:
        told = await http.get("/console/api/chat/models")
    assert (told.status_code, told.json()["error"]["message"]) == (401, "no key")


@pytest.mark.parametrize(
    ("url", "says"), [("", "knows no frontend"), ("http://127.0.0.1:9", "gave no answer: ConnectionRefusedError")]
)
async def test_a_frontend_that_is_not_there_is_named(url: str, says: str) -> None:
    async with console(url) as http:
        told = await http.get("/console/api/chat/models")
    assert told.status_code == 502
    assert says in told.json()["error"]["message"]


async def test_what_is_no_http_is_an_error_and_no_hang() -> None:
    async def chatter(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\r\n\r\n")
        await writer.drain()

    async with frontend(chatter) as url, console(url) as http:
        assert (await http.get("/console/api/chat/models")).status_code == 502


async def test_a_body_that_is_no_json_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_proxy, "MOST_BODY", 10)
    async with console("http://127.0.0.1:9") as http:
        form = await http.post("/console/api/chat", content=b"{}", headers={"content-type": "text/plain"})
        large = await http.post("/console/api/chat", content=b"x" * 11, headers={"content-type": "application/json"})
    assert (form.status_code, large.status_code) == (415, 413)
