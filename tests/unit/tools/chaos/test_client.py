"""A link carries bytes both ways, nothing while it is cut, and loses none of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.tools.chaos.client import Cut, NetworkProxy, post

QUIET_S = 0.1


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    handlers: list[asyncio.Task[None] | None] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await asyncio.gather(*(handler for handler in handlers if handler is not None))


async def connect(link: NetworkProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = link.url.removeprefix("nats://").split(":")
    return await asyncio.open_connection(host, int(port))


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def test_a_cut_link_carries_nothing_and_loses_nothing(echo: int) -> None:
    async with NetworkProxy("127.0.0.1", echo) as link:
        reader, writer = await connect(link)
        link.cut()
        writer.write(b"held back")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                await reader.read(1)
        link.mend()
        assert await reader.readexactly(9) == b"held back"
        await close(writer)


async def test_a_slow_link_carries_late_in_order(echo: int) -> None:
    async with NetworkProxy("127.0.0.1", echo) as link:
        reader, writer = await connect(link)
        link.slow(QUIET_S)
        began = asyncio.get_running_loop().time()
        writer.write(b"a")
        await asyncio.sleep(0)
        writer.write(b"b")
        assert await reader.readexactly(2) == b"ab"
        assert asyncio.get_running_loop().time() - began >= 2 * QUIET_S  # there and back
        await close(writer)


async def test_nobody_behind_it_ends_the_connection() -> None:
    async with NetworkProxy("127.0.0.1", 1) as link:
        reader, writer = await connect(link)
        assert await reader.read() == b""
        await close(writer)


SSE = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11\r\ndata: one\n\ndata: \r\n5\r\ntwo\n\n\r\n"


@pytest.mark.parametrize(
    ("answer", "began", "events"), [(b"", False, []), (b"HTTP/1.1 2", False, []), (SSE, True, [b"one", b"two"])]
)
async def test_an_answer_that_is_cut_says_whether_it_had_begun(answer: bytes, began: bool, events: list[bytes]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    seen: list[bytes] = []

    async def ask(port: int) -> None:
        async with post("127.0.0.1", port, "/", {}) as response:
            async for event in response.events():
                seen.append(event)  # noqa: PERF401  # what came before the cut counts

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises(Cut) as cut:
            await ask(server.sockets[0].getsockname()[1])
    assert (cut.value.began, seen) == (began, events)


async def test_a_request_that_reached_nobody_is_not_an_answer_that_was_cut() -> None:
    with pytest.raises(OSError, match=r"Connect call failed"):
        async with post("127.0.0.1", 9, "/", {}):
            pass
