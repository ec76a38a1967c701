"""Clients that leave, as the connection tells it: work for them stops, once, and nobody else's does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from headrace.frontend.errors import BodyTimeout, BodyTooLarge
from headrace.frontend.http.exchange import ClientGone, DisconnectWatch, HttpExchange, body_pieces
from headrace.frontend.settings import FrontendSettings


class Wire:
    """A connection that does as the test says."""

    full = False

    def __init__(self, *, whole: bool = True, lost: bool = False) -> None:
        self.whole, self.lost = whole, lost
        self.watcher: Any = None
        self.loop = asyncio.get_event_loop()

    def cut(self, last_words: bytes) -> None:
        raise AssertionError("nobody asked for that")

    def push(self, data: bytes) -> bool:
        return False

    def body_share(self) -> None:
        return None

    def arrived_body(self, most: int) -> None:
        return None

    def leave(self) -> None:
        self.lost = True
        if self.watcher is not None:
            self.watcher.left()


async def never() -> Any:
    await asyncio.Event().wait()


def exchange(wire: Wire, receive: Any = never) -> HttpExchange:
    async def send(message: Any) -> None:
        raise AssertionError(f"nothing is to be sent: {message}")

    return HttpExchange({"headers": [], "headrace.connection": wire}, receive, send)


async def test_work_stops_when_the_client_leaves() -> None:
    wire = Wire()
    asyncio.get_running_loop().call_soon(wire.leave)
    with pytest.raises(ClientGone):
        async with exchange(wire).watch():
            await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the cancellation is left behind"


async def test_work_that_ends_as_the_client_leaves_leaves_no_cancellation_behind() -> None:
    wire = Wire()
    with pytest.raises(ClientGone):
        async with exchange(wire).watch():
            wire.leave()
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_client_that_left_before_anybody_looked_is_noticed() -> None:
    with pytest.raises(ClientGone):
        async with exchange(Wire(lost=True)).watch():
            await asyncio.sleep(60)


async def test_the_connection_is_let_go_of_unless_the_next_request_has_it() -> None:
    wire = Wire()
    async with exchange(wire).watch():
        assert wire.watcher is not None
    assert wire.watcher is None
    following = DisconnectWatch(never, wire)
    async with exchange(wire).watch():
        wire.watcher = following
    assert wire.watcher is following


async def test_a_body_that_is_not_here_yet_is_not_waited_for_for_ever() -> None:
    with pytest.raises(BodyTimeout):
        await exchange(Wire(whole=False)).read_body(FrontendSettings(body_timeout_s=0.01))


async def test_a_body_that_is_here_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    def timer(_: float) -> Any:
        raise AssertionError("a timer for nothing")

    monkeypatch.setattr(asyncio, "timeout", timer)
    assert await exchange(Wire(), here).read_body(FrontendSettings()) == b"{}"


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
