"""Bodies that are read piece by piece."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from headrace.frontend.errors import BodyTimeout, BodyTooLarge
from headrace.frontend.http.body_stream import announced_bytes, body_pieces
from headrace.frontend.http.http_exchange import ClientGone


def request(*parts: bytes, announced: str = "", then: str = "end") -> Request:
    waiting = list(parts)

    async def receive() -> dict[str, Any]:
        if waiting:
            part = waiting.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(waiting) or then != "end"}
        if then == "stall":
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    headers = [(b"content-length", announced.encode())] if announced else []
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


async def read(made: Request, limit: int = 10, stall_s: float = 5.0) -> list[bytes]:
    return [piece async for piece in body_pieces(made, limit=limit, stall_s=stall_s)]


async def test_pieces_come_as_they_arrive() -> None:
    assert await read(request(b"abc", b"", b"defg", announced="7")) == [b"abc", b"defg"]
    assert announced_bytes(request(announced="7")) == 7
    assert announced_bytes(request()) is announced_bytes(request(announced="x")) is None


async def test_a_body_over_the_limit_is_refused_before_or_while_it_is_read() -> None:
    asked = request(b"a", announced="11")
    with pytest.raises(BodyTooLarge, match="11 bytes"):
        await read(asked)
    assert await read(request(b"0123456789")) == [b"0123456789"]
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        await read(request(b"012345", b"67890"))


async def test_a_body_that_stalls_is_a_timeout_and_a_client_that_leaves_is_gone() -> None:
    with pytest.raises(BodyTimeout, match="after 3 bytes"):
        await read(request(b"abc", then="stall"), stall_s=0.01)
    with pytest.raises(ClientGone):
        await read(request(b"abc", then="leave"))
