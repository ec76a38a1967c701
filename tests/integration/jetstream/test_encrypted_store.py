"""What a nats-server stores on the disk is encrypted: nothing of it can be read without its key, and nothing is lost."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from structlog.testing import capture_logs

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.encryption.store_key import KEY, StoreKeyUnusable
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


async def test_a_store_in_plain_text_is_encrypted_at_the_next_start_and_keeps_every_message(tmp_path: Path) -> None:
    async with running(tmp_path, PLAIN) as connection:
        await store(connection)
        before = await found(connection)
    assert in_plain_text(tmp_path)
    with capture_logs() as logs:
        async with running(tmp_path) as connection:
            assert not in_plain_text(tmp_path), "it is encrypted before the server takes clients, not when it is read"
            assert await found(connection) == before
            await connection.publish("hr.dlq.m", SECRET)
    assert [entry["event"] for entry in logs if entry["event"].startswith("server.store_enc")] == [
        "server.store_encrypting",
        "server.store_encrypted",
    ]
    assert not in_plain_text(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "nats-server.conf",
        "nats-server.log",
        "run",
        "store",
        KEY,
        f"{KEY}.id",
    }
    with capture_logs() as logs:
        async with running(tmp_path) as connection:
            assert (await found(connection))["HR_DLQ"][0] == before["HR_DLQ"][0] + 1
    assert not [entry for entry in logs if entry["event"].startswith("server.store")], "once is enough"


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
    refused(ENCRYPTED, str(key), "is gone", "--nats-store-key")
    assert not key.exists(), "no other one is made in its place"
    for other in ("0" * 64, "nonsense"):
        key.write_text(other + "\n")
        refused(ENCRYPTED, str(key))
    (tmp_path / f"{KEY}.id").unlink()
    key.write_text("0" * 64 + "\n")
    refused(ENCRYPTED, str(key), "opens 0 of its")
    moved = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    moved.write_text(right)
    async with running(tmp_path, ServerSettings(encrypt="aes", store_key=str(moved))) as connection:
        assert await found(connection) == before


async def test_the_key_is_replaced_and_the_old_one_opens_nothing_any_more(tmp_path: Path) -> None:
    async with running(tmp_path) as connection:
        await store(connection)
        before = await found(connection)
    (tmp_path / KEY).rename(tmp_path / "old.key")
    replacing = ServerSettings(encrypt="aes", old_store_key=str(tmp_path / "old.key"))
    (tmp_path / KEY).write_text("n" * 64)
    (tmp_path / KEY).chmod(0o600)
    async with running(tmp_path, replacing) as connection:
        assert await found(connection) == before
    async with running(tmp_path) as connection:
        assert await found(connection) == before
    with pytest.raises(StoreKeyUnusable, match="is not that of"):
        EmbeddedServer(tmp_path, ServerSettings(encrypt="aes", store_key=str(tmp_path / "old.key"))).start()


async def test_a_server_that_crashed_is_started_again_also_while_its_key_is_away(tmp_path: Path) -> None:
    async with running(tmp_path) as connection:
        await store(connection)
        before = await found(connection)
    (tmp_path / KEY).rename(tmp_path / "old.key")
    server = EmbeddedServer(tmp_path, ServerSettings(encrypt="aes", old_store_key=str(tmp_path / "old.key")))
    (tmp_path / KEY).write_text("n" * 64)
    await server.start_async()
    try:
        for file in (KEY, "old.key"):
            (tmp_path / file).rename(tmp_path / f"{file}.away")
        server.kill()
        await server.start_async()
        async with await Connection.connect(ConnectOptions(servers=(server.url,)), subjects=S) as connection:
            assert await found(connection) == before
    finally:
        await server.stop_async()


async def test_a_stream_whose_next_block_was_not_finished_by_a_killed_server_is_whole(tmp_path: Path) -> None:
    """nats-server makes the file of a block before its key, and leaves the stream out where it was killed between the two."""
    async with running(tmp_path) as connection:
        await store(connection)
        before = await found(connection)
    (messages,) = tmp_path.glob("store/jetstream/*/streams/HR_DLQ/msgs")
    last = max(int(file.stem) for file in messages.glob("*.blk"))
    (messages / f"{last + 1}.blk").touch()
    with capture_logs() as logs:
        async with running(tmp_path) as connection:
            assert await found(connection) == before
            await connection.publish("hr.dlq.m", SECRET)
    assert [entry["streams"] for entry in logs if entry["event"] == "server.unfinished_blocks_removed"] == [("HR_DLQ",)]
    assert not [entry for entry in logs if entry["event"] == "server.streams_left_out"]


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


async def test_a_consumer_whose_encrypted_file_is_too_short_begins_again_and_the_server_starts(tmp_path: Path) -> None:
    async with running(tmp_path) as connection:
        await store(connection)
    [state] = tmp_path.rglob("taker/o.dat")
    state.write_bytes(state.read_bytes()[:10])
    with capture_logs() as logs:
        async with running(tmp_path) as connection:
            assert (await found(connection))["taker"][:2] == [0, 57]
    assert [entry["consumers"] for entry in logs if entry["event"] == "server.consumers_damaged"] == [("HR_JOB/taker",)]


async def test_an_encryption_that_fails_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, PLAIN) as connection:
        await store(connection)
        before = await found(connection)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(StoreKeyUnusable, match="no room for an encrypted copy"):
        EmbeddedServer(tmp_path, ENCRYPTED).start()
    monkeypatch.undo()
    with pytest.raises(StoreKeyUnusable, match=r"as it was: .*nats-server\.conf:3"):
        EmbeddedServer(tmp_path, ServerSettings(encrypt="aes", max_payload="nonsense")).start()
    assert in_plain_text(tmp_path / "store")
    async with running(tmp_path) as connection:
        assert await found(connection) == before
    assert not in_plain_text(tmp_path)
