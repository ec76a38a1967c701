"""What a nats-server stores on the disk is encrypted: nothing of it can be read without its key, and nothing is lost."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from structlog.testing import capture_logs

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import KEY, EmbeddedServer, ServerStartError, StoreKeyUnusable
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

PLAIN = ServerSettings(encrypt="none")
ENCRYPTED = ServerSettings(encrypt="aes")
SECRET = b"my PIN is 4711"
S = Subjects("hr")
TOPOLOGY = Topology(S)
ON_DISK = [spec for spec in TOPOLOGY.all_streams() if spec.storage == "file" and not spec.on_demand and not spec.counts]
STREAMS = {spec.name for spec in ON_DISK}


@contextlib.asynccontextmanager
async def running(data: Path, settings: ServerSettings = ENCRYPTED) -> AsyncIterator[Connection]:
    server = EmbeddedServer(data, settings)
    await server.start_async()
    try:
        async with await Connection.connect(ConnectOptions(servers=(server.url,)), subjects=S) as connection:
            yield connection
    finally:
        await server.stop_async()


async def store(connection: Connection) -> None:
    """Store into every stream that a deployment has on the disk; some messages are in later blocks, deleted, or taken."""
    await ensure_topology(connection, TOPOLOGY)
    client = await nats.connect(connection.options.servers[0])
    for spec in ON_DISK:
        subject = spec.subjects[0].replace("*", "x").replace(">", "x.y")
        for number in range(3):
            await client.publish(subject, SECRET + b"%d" % number)  # the server answers not for all of them
    await client.flush()
    for number in range(60):
        await connection.publish(S.job("m", "acme"), SECRET + b"%d" % number)
        await connection.publish("hr.dlq.m", SECRET + b"%d" % number + b"x" * 300_000)
    for number in (3, 4, 17, 63):
        assert await connection.delete_message("HR_DLQ", number)
    for number in range(20):
        await connection.bucket("hr_keys").put(f"k{number % 9}", SECRET + b"%d" % number)
    await connection.objects("hr_files").put("acme/f", SECRET * 30_000)
    config = {"durable_name": "taker", "ack_policy": "explicit", "ack_wait": 60_000_000_000}
    await connection.api.call("CONSUMER.CREATE.HR_JOB.taker", {"stream_name": "HR_JOB", "config": config})
    taken = await client.subscribe("taken")
    await client.publish("$JS.API.CONSUMER.MSG.NEXT.HR_JOB.taker", b"10", reply="taken")
    for number in range(10):
        message = await taken.next_msg(10)
        if number < 6:
            await client.request(message.reply, b"+ACK", timeout=10)
    await client.close()


async def found(connection: Connection) -> dict[str, Any]:
    """Return all that the streams hold, and where their consumers are."""
    held: dict[str, Any] = {}
    for stream in (spec.name for spec in ON_DISK):
        state = (await connection.api.call(f"STREAM.INFO.{stream}", {}))["state"]
        messages = {}
        for number in range(state["first_seq"], state["last_seq"] + 1):
            message = await connection.get_message(stream, number)
            messages[number] = message and (message.subject, message.data)
        held[stream] = (state["messages"], state["first_seq"], state["last_seq"], messages)
    taker = await connection.api.call("CONSUMER.INFO.HR_JOB.taker", {})
    held["taker"] = [taker["num_ack_pending"], taker["num_pending"], taker["ack_floor"]["stream_seq"]]
    held["file"] = await connection.objects("hr_files").get("acme/f")
    return held


def in_plain_text(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and SECRET in file.read_bytes()]


async def test_no_file_holds_what_is_stored_unless_encryption_is_turned_off(tmp_path: Path) -> None:
    for name, settings in (("plain", PLAIN), ("encrypted", ENCRYPTED)):
        async with running(tmp_path / name, settings) as connection:
            await store(connection)
    assert {file.parts[-3] for file in in_plain_text(tmp_path / "plain")} >= STREAMS
    assert not in_plain_text(tmp_path / "encrypted")


async def test_a_store_is_not_converted_and_the_refusal_names_it(tmp_path: Path) -> None:
    async with running(tmp_path, PLAIN) as connection:
        await store(connection)
        before = await found(connection)
    with pytest.raises(StoreKeyUnusable, match=rf"{tmp_path / 'store'} is in plain text and is not converted"):
        EmbeddedServer(tmp_path, ENCRYPTED).start()
    async with running(tmp_path, PLAIN) as connection:
        assert await found(connection) == before
    (tmp_path / "store").rename(tmp_path / "away")
    async with running(tmp_path) as connection:
        await store(connection)
    assert not in_plain_text(tmp_path / "store")


async def test_an_encrypted_store_is_not_used_without_encryption_without_its_key_or_with_another(tmp_path: Path) -> None:
    async with running(tmp_path) as connection:
        await store(connection)
        before = await found(connection)
    key = tmp_path / KEY
    right = key.read_text()

    def refused(settings: ServerSettings, *words: str) -> None:
        with pytest.raises(StoreKeyUnusable) as failed:
            EmbeddedServer(tmp_path, settings).start()
        assert all(word in str(failed.value) for word in words), failed.value

    refused(PLAIN, str(tmp_path / "store"), "is encrypted", "--nats-encrypt aes")
    key.unlink()
    refused(ENCRYPTED, str(key), "is missing", "--nats-store-key")
    assert not key.exists(), "no other one is made in its place"
    for other in ("0" * 64, "nonsense"):
        key.write_text(other + "\n")
        refused(ENCRYPTED, str(key))
    moved = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    moved.write_text(right)
    async with running(tmp_path, ServerSettings(encrypt="aes", store_key=str(moved))) as connection:
        assert await found(connection) == before


async def test_a_server_that_crashed_is_started_again_also_while_its_key_is_away(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, ENCRYPTED)
    await server.start_async()
    try:
        (tmp_path / KEY).rename(tmp_path / "away")
        await server.stop_async()
        await server.start_async()
    finally:
        await server.stop_async()


async def test_the_key_is_told_to_the_server_alone(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, ENCRYPTED)
    with capture_logs() as logs:
        await server.start_async()
    try:
        key = (tmp_path / KEY).read_text().strip()
        assert len(key) == 64
        assert (tmp_path / KEY).stat().st_mode & 0o777 == 0o600
        assert key not in str(logs)
        assert key.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        holders = [file.name for file in tmp_path.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
        assert holders == [KEY]
    finally:
        await server.stop_async()


async def test_a_consumer_whose_encrypted_file_is_too_short_ends_the_start_with_an_error_of_the_server(tmp_path: Path) -> None:
    async with running(tmp_path) as connection:
        await store(connection)
    [state] = tmp_path.rglob("taker/o.dat")
    state.write_bytes(state.read_bytes()[:10])
    with pytest.raises(ServerStartError, match="nats-server ended with code"):
        async with running(tmp_path):
            pass
