"""Closing a connection whose servers are gone or stand still ends soon, whatever it was doing; nothing goes on after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import structlog

from headrace.jetstream import client
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.dial import abandon
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from tests.conftest import Connect
from tests.integration.jetstream.waiting import until

S = Subjects("hr")
SOON_S = 15.0  # none of these waits had a limit, or the client's own would be minutes
DEATHS = ["gone", "frozen"]


@contextlib.asynccontextmanager
async def dead(server: EmbeddedServer, death: str) -> AsyncIterator[None]:
    if death == "gone":
        server.kill()
    else:
        server.pause()
    try:
        yield
    finally:
        if death == "frozen":
            server.resume()


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Fail if the body takes too long, or leaves a task."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(SOON_S):
        yield
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("servers", [1, 2])
async def test_while_it_connects(own_server: EmbeddedServer, death: str, servers: int) -> None:
    options = ConnectOptions(servers=(own_server.url,) * servers, connect_timeout_s=600.0)
    async with dead(own_server, death), nothing_left():
        connecting = asyncio.create_task(Connection.connect(options, subjects=S))
        await asyncio.wait({connecting}, timeout=0.3)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError, JetStreamError):
            await connecting


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("servers", [1, 2])
async def test_while_it_is_connected(own_server: EmbeddedServer, death: str, servers: int) -> None:
    """With two servers it has a task of its own, which asks the other one where this one is silent."""
    async with nothing_left():
        urls = (own_server.url, own_server.url.replace("127.0.0.1", "localhost"))[:servers]
        connection = await Connection.connect(ConnectOptions(servers=urls), subjects=S)
        async with dead(own_server, death):
            if servers > 1:
                await asyncio.sleep(1.2)  # the other one is being asked
            await connection.close()
            assert not connection.connected


@pytest.mark.parametrize("death", DEATHS)
async def test_while_it_connects_again(own_server: EmbeddedServer, death: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.jetstream.dial.PING_INTERVAL_S", 0.1)
    async with nothing_left():
        connection = await Connection.connect(ConnectOptions(servers=(own_server.url,)), subjects=S)
        async with dead(own_server, death):
            await until(lambda: not connection.connected)
            await asyncio.sleep(0.3)  # an attempt is under way, or the pause between two
            trying = connection.core._reconnection_task
            await connection.close()
            assert trying.done()


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("drained", [False, True])
async def test_while_it_publishes_more_than_the_socket_takes(own_server: EmbeddedServer, death: str, drained: bool) -> None:
    async with nothing_left():
        connection = await Connection.connect(ConnectOptions(servers=(own_server.url,)), subjects=S)
        async with dead(own_server, death):
            publishing = [asyncio.create_task(connection.publish("x.y", bytes(500_000), timeout_s=600.0)) for _ in range(40)]
            await asyncio.sleep(0.1)
            await (connection.drain() if drained else connection.close())
            ended = await asyncio.gather(*publishing, return_exceptions=True)
            assert all(isinstance(one, JetStreamError) for one in ended), ended


async def test_where_its_socket_never_drains(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain client counts a ping as bytes to be sent, and waits without limit until the server has taken all."""
    monkeypatch.setattr("headrace.jetstream.dial.CLOSE_S", 0.2)
    connection = await connect(own_server)
    own_server.pause()
    try:
        core = connection.core
        core._transport.write(bytes(20_000_000))
        core.mark_down()
        core._pending_data_size = 6
        socket = core._transport._io_writer.transport
        async with asyncio.timeout(SOON_S):
            await abandon(core)
        assert socket.is_closing()
    finally:
        own_server.resume()


async def test_from_a_task_of_its_own(own_server: EmbeddedServer, connect: Connect) -> None:
    """It does not wait for the task that closes it."""
    connection = await connect(own_server)
    closed = asyncio.Event()

    async def close() -> None:
        await connection.close()
        closed.set()

    connection.on_reconnect(close)
    await connection.core.force_reconnect()
    async with asyncio.timeout(SOON_S):
        await closed.wait()
    assert connection.core.is_closed


async def test_with_a_task_that_goes_on_it_says_which(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TASKS_S", 0.2)
    connection = await connect(own_server)
    began, end = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        began.set()
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    connection.on_reconnect(stubborn)
    await connection.core.force_reconnect()
    await until(began.is_set)
    try:
        with structlog.testing.capture_logs() as logs:
            async with asyncio.timeout(SOON_S):
                await connection.close()
        assert connection.core.is_closed
        assert [line["event"] for line in logs if line["log_level"] == "error"] == ["connection.task_left"]
    finally:
        end.set()


async def test_attempts_to_connect_end_at_one_cancellation_even_if_it_is_lost(
    own_server: EmbeddedServer, connect: Connect
) -> None:
    """As when an event loop closes over a connection that nobody has closed: it cancels each task once, and waits for all."""
    connection = await connect(own_server)
    lost = 0

    async def attempt(*_arguments: object, **_options: object) -> None:
        nonlocal lost
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:  # and `asyncio.wait_for` before Python 3.12 tells of the failure only
            if lost:
                raise
            lost += 1
            raise ConnectionRefusedError from None

    connection.core._transport.connect = attempt
    own_server.kill()
    await until(lambda: not connection.connected)
    trying = connection.core._reconnection_task
    await asyncio.sleep(0.3)
    trying.cancel()
    async with asyncio.timeout(SOON_S):
        await asyncio.wait({trying})
    assert lost == 1
    await connection.close()
