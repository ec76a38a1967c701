"""The index of records against a real server: changes by many writers, lists of one tenant, and names of any characters."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from headrace.broker.errors import ResponseNotStored
from headrace.broker.ingress.response_store import RecordIndex
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

NAME = "chatcmpl-a.b/c:*>"


@pytest.fixture
def index(connection: Connection, subjects: Subjects) -> RecordIndex:
    return RecordIndex(connection, subjects, ttl_s=60.0)


async def test_a_record_is_written_read_and_deleted(index: RecordIndex) -> None:
    assert await index.get("chat", "_", NAME) is None
    await index.put("chat", "_", NAME, b"one")
    assert await index.get("chat", "_", NAME) == b"one"
    assert await index.get("chat", "t", NAME) is None
    assert await index.get("conv", "_", NAME) is None
    await index.delete("chat", "_", NAME)
    await index.delete("chat", "_", NAME)
    assert await index.get("chat", "_", NAME) is None
    assert await index.change("chat", "_", NAME, lambda value: value) is None


async def test_changes_of_many_writers_are_all_kept(index: RecordIndex) -> None:
    await index.put("conv", "t", "c", b"")
    await asyncio.gather(*(index.change("conv", "t", "c", lambda value, i=i: value + bytes([i])) for i in range(6)))  # type: ignore[misc]
    value = await index.get("conv", "t", "c")
    assert value is not None
    assert sorted(value) == list(range(6))


async def test_a_list_has_the_records_of_one_kind_and_tenant(index: RecordIndex) -> None:
    for i in range(30):
        await index.put("chat", "t", f"{NAME}{i}", bytes([i]))
    await index.put("chat", "other", NAME, b"x")
    await index.put("conv", "t", NAME, b"x")
    assert sorted(await index.list("chat", "t")) == [bytes([i]) for i in range(30)]
    assert await index.list("chat", "none") == []


async def test_a_full_bucket_makes_room_by_the_oldest(connection: Connection, subjects: Subjects, index: RecordIndex) -> None:
    await ensure_topology(connection, replace(Topology(subjects), record_bytes=50_000))
    for i in range(8):
        await index.put("chat", "t", str(i), os.urandom(10_000))
    assert await index.get("chat", "t", "7") is not None
    assert await index.get("chat", "t", "0") is None


async def test_a_bucket_that_does_not_answer_is_an_error_in_time(own_server: EmbeddedServer, subjects: Subjects) -> None:
    async with await Connection.connect(ConnectOptions(servers=(own_server.url,)), subjects=subjects) as connection:
        await ensure_topology(connection, Topology(subjects))
        index = RecordIndex(connection, subjects, ttl_s=60.0)
        await index.put("chat", "t", "a", b"x")
        await own_server.stop_async()
        async with asyncio.timeout(15):
            with pytest.raises(ResponseNotStored) as caught:
                await index.put("chat", "t", "a", b"x")
            assert caught.value.reason in ("timeout", "unavailable")
            with pytest.raises(JetStreamError):
                await index.list("chat", "t")
