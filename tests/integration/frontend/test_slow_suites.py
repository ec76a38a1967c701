"""Slow clients as slowloris and slowhttptest play them: others are answered, memory is bounded, and each connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from headrace.frontend import serving
from headrace.frontend.http import connections
from headrace.frontend.settings import FrontendSettings
from tests.integration.frontend.test_robust_bodies import resident_bytes
from tests.support import rude_server
from tests.support.rude_server import PATH, Running, running

MANY = 100
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
RANGES = b"range: bytes=0-" + b"".join(b",5-%d" % n for n in range(1300)) + b"\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n"

Client = Callable[[Running], Awaitable[None]]


async def dripping(server: Running, start: bytes, drop: bytes) -> None:
    """Send a start, then a little at a time until the server ends the connection."""
    reader, writer = await server.connect()
    writer.write(start)
    end = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        while not end.done():
            writer.write(drop)
            await asyncio.wait({end}, timeout=0.1)
        await end
    writer.transport.abort()


async def headers(server: Running) -> None:
    await dripping(server, HEAD + b"content-length: 5\r\n", b"x-a: b\r\n")


async def slowloris(server: Running) -> None:
    await dripping(server, b"GET /?1 HTTP/1.1\r\nuser-agent: x\r\naccept-language: en\r\n", b"x-a: 1\r\n")


async def nothing(server: Running) -> None:
    await dripping(server, b"", b"")


async def body(server: Running) -> None:
    await dripping(server, HEAD + b"content-length: 33000000\r\n\r\n", b" ")


async def chunks(server: Running) -> None:
    await dripping(server, HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n")


async def trailers(server: Running) -> None:
    await dripping(server, HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x-a: b\r\n")


async def ranges(server: Running) -> None:
    """An answer for each range would be 1,300 times the document."""
    reader, writer = await server.connect()
    writer.write(GET + RANGES + b"connection: close\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert len(answer) < 4 << 20
    writer.close()


CLIENTS: dict[str, Client] = {
    "slowhttptest -H": headers,
    "slowloris": slowloris,
    "connects only": nothing,
    "slowhttptest -B": body,
    "chunks": chunks,
    "trailers": trailers,
    "slowhttptest -R": ranges,
}


LIMITS = {"header_timeout_s": 1.0, "body_timeout_s": 1.0, "slow_client_s": 0.5, "keep_alive_s": 1.0}
MEMORY = 200 << 20


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.slow
async def test_clients_that_send_slowly_are_ended_and_keep_nobody_from_an_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.5)
    async with running(**LIMITS) as server:
        await server.alive()
        before, most = resident_bytes(), 0
        async with asyncio.timeout(45), asyncio.TaskGroup() as group:
            clients = [group.create_task(CLIENTS[name](server)) for _ in range(MANY)]
            while not all(client.done() for client in clients):
                await server.alive()
                most = max(most, resident_bytes() - before)
                await asyncio.sleep(0.1)
        assert most < MEMORY


UNREAD = {
    "slowhttptest -X": (GET + b"\r\n") * 3,
    "an answer that fits into the write buffer": b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


def small_listen(settings: FrontendSettings) -> socket.socket:
    """Listen with a buffer in the kernel that holds no answer, as that of a far client would be full in the end."""
    listener = serving.listen(settings)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.slow
async def test_clients_that_read_nothing_are_ended_and_keep_nobody_from_an_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.5)
    monkeypatch.setattr(rude_server, "listen", small_listen)
    async with running(**LIMITS) as server, contextlib.AsyncExitStack() as opened:
        await server.alive()
        before, loop = resident_bytes(), asyncio.get_running_loop()
        for _ in range(MANY):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, UNREAD[name])
        async with asyncio.timeout(45):
            while open_connections(server) > 1:
                await server.alive()
                assert resident_bytes() - before < MEMORY
                await asyncio.sleep(0.1)


def open_connections(server: Running) -> float:
    lines = server.metrics.render().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("headrace_frontend_connections ")))
