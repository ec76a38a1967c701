"""Connecting, core messages, and the traps of the plain client that concern a connection as a whole."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import (
    AccessDenied,
    JetStreamDisabled,
    NoResponder,
    NotConnected,
    PayloadTooLarge,
    RequestTimeout,
    ServerTooOld,
    ServerUnreachable,
)
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from tests.conftest import Connect
from tests.integration.jetstream.waiting import until

SUBJECTS = Subjects("hr")


@contextlib.asynccontextmanager
async def speaking(info: dict[str, object]) -> AsyncIterator[str]:
    """Not a NATS server: it says what one would say of itself, and answers pings. There is no old server to test with."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"INFO {json.dumps(info)}\r\n".encode())
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_an_address_without_a_server_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerUnreachable, match=f"127.0.0.1:{port}"):
        await Connection.connect(ConnectOptions(servers=(f"nats://u:secret@127.0.0.1:{port}",)), subjects=SUBJECTS)


async def test_a_port_that_says_nothing_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    started = time.monotonic()
    with pytest.raises(ServerUnreachable, match=str(port)):
        await Connection.connect(
            ConnectOptions(servers=(f"nats://127.0.0.1:{port}",), connect_timeout_s=0.2), subjects=SUBJECTS
        )
    assert time.monotonic() - started < 2.0
    server.close()


async def test_an_old_server_is_refused_by_version() -> None:
    async with speaking({"version": "2.10.29", "jetstream": True, "max_payload": 1024, "headers": True}) as url:
        with pytest.raises(ServerTooOld, match=r"2\.10\.29.*2\.11"):
            await Connection.connect(ConnectOptions(servers=(url,)), subjects=SUBJECTS)


async def test_a_server_with_published_ways_around_permissions_is_named_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async with speaking({"version": "2.14.2", "max_payload": 1024, "headers": True}) as url:
        with pytest.raises(JetStreamDisabled):
            await Connection.connect(ConnectOptions(servers=(url,)), subjects=SUBJECTS)
    told = capsys.readouterr().out
    assert "server.bypasses_known" in told
    assert "2.14.3" in told


async def test_a_server_without_jetstream_is_refused_by_name() -> None:
    async with speaking({"version": "2.15.1", "max_payload": 1024, "headers": True}) as url:
        with pytest.raises(JetStreamDisabled, match="-js"):
            await Connection.connect(ConnectOptions(servers=(url,)), subjects=SUBJECTS)


ACCOUNTS = """
accounts {
  FULL { jetstream: enabled, users: [
    {user: full, password: pw}
    {user: few, password: pw, permissions: {publish: {deny: ["$JS.API.>"]}}}
    {user: deaf, password: pw, permissions: {subscribe: {allow: ["nothing"]}}}
    {user: partly, password: pw, permissions: {publish: {deny: ["$JS.API.STREAM.PURGE.>", "secret.>"]}}}
  ] }
  NONE { users: [ {user: none, password: pw} ] }
}
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> object:
    with EmbeddedServer(tmp_path_factory.mktemp("guarded"), ServerSettings(extra=ACCOUNTS)) as server:
        yield server


async def login(server: EmbeddedServer, user: str, password: str = "pw") -> Connection:
    options = ConnectOptions(servers=(server.url,), user=user, password=password, connect_timeout_s=2.0)
    return await Connection.connect(options, subjects=SUBJECTS)


@pytest.mark.parametrize(
    ("user", "password", "error", "words"),
    [
        ("full", "wrong", AccessDenied, "refused the credentials"),
        ("none", "pw", JetStreamDisabled, "account"),
        ("few", "pw", AccessDenied, r"js\.api"),
        ("deaf", "pw", AccessDenied, "subscription"),
    ],
)
async def test_each_kind_of_refusal_is_told_apart(
    guarded: EmbeddedServer, user: str, password: str, error: type[Exception], words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=words):
        await login(guarded, user, password)
    assert time.monotonic() - started < 1.5  # told, not timed out


async def test_a_missing_permission_fails_the_call_it_is_about(guarded: EmbeddedServer) -> None:
    async with await login(guarded, "partly") as connection:
        with pytest.raises(AccessDenied, match="purge"):
            await connection.api.call("STREAM.PURGE.X")
        with pytest.raises(AccessDenied, match="secret"):
            await connection.publish("secret.x", b"")
        await connection.api.call("INFO")  # the connection lives on


async def test_a_connection_is_messaging(connection: Connection) -> None:
    typed: Messaging = connection
    assert typed.connected
    assert typed.max_payload == 1024 * 1024
    assert typed.connected_since_s <= asyncio.get_running_loop().time()


async def test_messages_arrive_in_the_order_of_sending_across_subjects(connection: Connection, prefix: str) -> None:
    got: list[bytes] = []
    for name in ("a", "b"):
        await connection.subscribe(f"{prefix}.x.{name}", lambda m: got.append(m.data))
    for n in range(200):
        connection.send(f"{prefix}.x.{'ab'[n % 2]}", b"%d" % n)
    await until(lambda: len(got) == 200)
    assert got == [b"%d" % n for n in range(200)]


async def test_send_and_publish_keep_their_order(connection: Connection, subjects: Subjects) -> None:
    """Trap 12: the protocol needs the last frame routed before the ack that follows it."""
    seen: list[bytes] = []
    await connection.subscribe(subjects.out("i"), lambda m: seen.append(m.data))
    await connection.subscribe(subjects.work("p", "w"), lambda m: seen.append(m.data))
    connection.send(subjects.out("i"), b"1")
    stored = asyncio.ensure_future(connection.publish(subjects.work("p", "w"), b"2"))
    await asyncio.sleep(0)
    connection.send(subjects.out("i"), b"3")
    await stored
    await until(lambda: len(seen) == 3)
    assert seen == [b"1", b"2", b"3"]


async def test_a_process_hears_itself(connection: Connection, prefix: str) -> None:
    """no_echo is off: an ingress and a worker may share a connection."""

    def answer(message: Message) -> None:
        connection.send(message.reply, b"re:" + message.data)

    await connection.subscribe(f"{prefix}.svc", answer)
    assert await connection.request(f"{prefix}.svc", b"x", timeout_s=1.0) == b"re:x"


async def test_a_request_without_listener_fails_at_once(connection: Connection, prefix: str) -> None:
    with pytest.raises(NoResponder, match="nobody"):
        await connection.request(f"{prefix}.nobody", b"", timeout_s=5.0)


async def test_a_request_without_answer_times_out(connection: Connection, prefix: str) -> None:
    await connection.subscribe(f"{prefix}.mute", lambda m: None)
    with pytest.raises(RequestTimeout, match="mute"):
        await connection.request(f"{prefix}.mute", b"", timeout_s=0.05)


async def test_queue_subscribers_share_and_leave(connection: Connection, prefix: str) -> None:
    got: list[str] = []
    first = await connection.subscribe(f"{prefix}.q", lambda m: got.append("a"), queue="g")
    await connection.subscribe(f"{prefix}.q", lambda m: got.append("b"), queue="g")
    await connection.barrier()
    for _ in range(20):
        connection.send(f"{prefix}.q", b"")
    await until(lambda: len(got) == 20)
    await first.unsubscribe()
    got.clear()
    for _ in range(5):
        connection.send(f"{prefix}.q", b"")
    await until(lambda: len(got) == 5)
    assert set(got) == {"b"}


async def test_too_large_a_message_is_refused_here_and_costs_no_connection(connection: Connection, prefix: str) -> None:
    with pytest.raises(PayloadTooLarge):
        connection.send(f"{prefix}.x", bytes(connection.max_payload + 1))
    with pytest.raises(PayloadTooLarge):
        await connection.publish(f"{prefix}.x", bytes(connection.max_payload), headers={"A": "b"})
    await connection.barrier()
    assert connection.connected


async def test_a_failing_callback_does_not_stop_the_others(connection: Connection, prefix: str) -> None:
    got: list[bytes] = []

    def callback(message: Message) -> None:
        got.append(message.data)
        if message.data == b"bad":
            raise RuntimeError("bug")

    await connection.subscribe(f"{prefix}.x", callback)
    for data in (b"bad", b"good"):
        connection.send(f"{prefix}.x", data)
    await until(lambda: got == [b"bad", b"good"])


async def test_a_slow_part_does_not_hold_up_or_drop_messages(connection: Connection, prefix: str) -> None:
    """Traps 7 and 9: the plain client has one queue per subscription, which an awaiting handler blocks and which drops
    what does not fit. Here nothing is queued on our side at all."""
    got: list[bytes] = []
    sub = await connection.subscribe(f"{prefix}.x", lambda m: got.append(m.data))
    await connection.barrier()
    tap = sub._tap
    for n in range(3000):
        connection.send(f"{prefix}.x", b"%d" % n)
    await until(lambda: len(got) == 3000)
    assert got == [b"%d" % n for n in range(3000)]
    assert tap._pending_queue.maxsize == 1  # had any message gone through the client's queue, it would have been lost
    assert tap.pending_msgs == 0


async def test_closing_lets_what_was_sent_reach_the_server(connect: Connect, connection: Connection, prefix: str) -> None:
    got: list[bytes] = []
    await connection.subscribe(f"{prefix}.x", lambda m: got.append(m.data))
    await connection.barrier()
    leaving = await connect()
    leaving.send(f"{prefix}.x", b"last words")
    await leaving.drain()
    assert not leaving.connected
    await until(lambda: got == [b"last words"])
    leaving.send(f"{prefix}.x", b"too late")  # dropped, not raised
    with pytest.raises(NotConnected):
        await leaving.request(f"{prefix}.x", b"", timeout_s=0.1)
