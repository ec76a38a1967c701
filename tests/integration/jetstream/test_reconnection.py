"""The connection breaks: what is found again by itself, what fails at once, and what nobody waits for."""

import asyncio
import contextlib

import nats
import pytest

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import NotConnected
from tests.conftest import Connect
from tests.integration.jetstream.waiting import until


async def test_a_killed_server_is_found_again_by_itself(own_server: EmbeddedServer, connect: Connect, prefix: str) -> None:
    """Trap 5: two seconds between tries, traceback spam, and the end after sixty of them."""
    connection = await connect(own_server)
    back = asyncio.Event()

    async def on_reconnect() -> None:
        back.set()

    connection.on_reconnect(on_reconnect)
    got: list[bytes] = []
    await connection.subscribe(f"{prefix}.x", lambda m: got.append(m.data))
    since = connection.connected_since_s
    own_server.kill()
    await until(lambda: not connection.connected)
    connection.send(f"{prefix}.x", b"lost")
    with pytest.raises(NotConnected):
        await connection.request(f"{prefix}.x", b"", timeout_s=5.0)
    await connection.subscribe(f"{prefix}.y", lambda m: got.append(m.data))  # while down: made good on return
    await own_server.start_async()
    async with asyncio.timeout(1.5):
        await back.wait()
    assert connection.connected_since_s > since
    connection.send(f"{prefix}.x", b"x")
    connection.send(f"{prefix}.y", b"y")
    await until(lambda: len(got) == 2)
    assert got == [b"x", b"y"]  # and not what was sent into the void
    assert connection._core.options["max_reconnect_attempts"] == -1


async def test_a_request_in_flight_when_the_server_dies_fails_at_once(
    own_server: EmbeddedServer, connect: Connect, prefix: str
) -> None:
    connection = await connect(own_server)
    await connection.subscribe(f"{prefix}.mute", lambda m: None)
    asking = asyncio.ensure_future(connection.request(f"{prefix}.mute", b"", timeout_s=30.0))
    await connection.barrier()
    own_server.kill()
    with pytest.raises(NotConnected):
        async with asyncio.timeout(2.0):
            await asking


async def test_a_silent_server_is_noticed_by_pings(
    own_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 5: a half-open connection. The plain client takes minutes."""
    monkeypatch.setattr("headrace.jetstream.dial.PING_INTERVAL_S", 0.1)
    connection = await connect(own_server)
    own_server.pause()
    try:
        await until(lambda: not connection.connected)
    finally:
        own_server.resume()
    await until(lambda: connection.connected)


async def test_an_error_line_of_the_server_means_reconnect_not_the_end(own_server: EmbeddedServer, connect: Connect) -> None:
    connection = await connect(own_server)
    await connection._core._process_err("'maximum connections exceeded'")
    await until(lambda: connection.connected)
    await connection.api.call("INFO")


async def test_nothing_waits_in_line_for_a_server_that_is_gone(own_server: EmbeddedServer, connect: Connect) -> None:
    """Trap 5: the plain client gathers up to its limit, raises, and replays stale messages later."""
    plain = await nats.connect(own_server.url, error_cb=_ignore, pending_size=1000, reconnect_time_wait=0.1)
    connection = await connect(own_server)
    own_server.kill()
    await until(lambda: not connection.connected and plain.is_reconnecting)
    await plain.publish("x", bytes(900))
    with pytest.raises(nats.errors.OutboundBufferLimitError):
        await plain.publish("x", bytes(900))
    for _ in range(50):
        connection.send("x", bytes(100))
    assert connection._core.pending_data_size == 0
    with contextlib.suppress(ConnectionResetError):
        await plain.close()


async def test_a_closed_connection_does_not_go_on_trying(own_server: EmbeddedServer, connect: Connect) -> None:
    """Nor when a cancellation is lost, as `asyncio.wait_for` before Python 3.12 loses one that comes when an attempt has just
    failed."""
    connection = await connect(own_server)
    attempts = lost = 0

    async def attempt(_server: object) -> None:
        nonlocal attempts, lost
        attempts += 1
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            if lost:
                raise
            lost += 1
            raise ConnectionRefusedError from None

    connection._core._connect_to_server = attempt
    own_server.kill()
    await until(lambda: attempts)
    trying = connection._core._reconnection_task
    await connection.close()
    assert lost == 1
    assert trying.done()


async def test_closing_is_not_cancelled_by_what_waited_for_the_same_socket(
    own_server: EmbeddedServer, connect: Connect
) -> None:
    """A reconnection waits so, and is cancelled by the closing."""
    connection = await connect(own_server)
    waiting = asyncio.ensure_future(connection._core._transport.wait_closed())
    await asyncio.sleep(0)
    waiting.cancel()
    await connection.close()
    assert waiting.cancelled()


async def _ignore(_error: Exception) -> None:
    pass


async def test_a_read_of_several_messages_ends_with_its_connection(own_server: EmbeddedServer, connect: Connect) -> None:
    """Not with its timeout: nothing of what it waits for can come any more."""
    connection = await connect(own_server)
    own_server.pause()
    reading = asyncio.ensure_future(connection.last_messages("HR_KV", ["hr.kv.p.w"]))
    await asyncio.sleep(0)
    own_server.kill()
    with pytest.raises(NotConnected, match="during a read"):
        await reading
