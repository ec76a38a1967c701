"""The store of responses against a real server: lives of their own, room for the new, and faults that have names."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import pytest

from headrace.broker.errors import ResponseNotStored, ResponseUnknown
from headrace.broker.ingress.response_store import ResponseStore, StoredResponse, StoreLimits
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

TURN = StoredResponse(id="resp_1", tenant="t", created=1.0, answer=b"{}", input=b'[{"a":1}]', output=b'[{"b":2}]')


@pytest.fixture
def store(connection: Connection, subjects: Subjects) -> ResponseStore:
    return ResponseStore(connection, subjects)


async def test_a_response_comes_back_as_it_was(store: ResponseStore) -> None:
    await store.put(TURN)
    assert await store.get("resp_1", "t") == TURN
    assert TURN.items() == [{"a": 1}, {"b": 2}]


async def test_one_larger_than_a_message_comes_back_too(store: ResponseStore) -> None:
    large = StoredResponse(id="resp_large", answer=os.urandom(3 * 1024 * 1024))
    await store.put(large)
    assert (await store.get("resp_large", "_")).answer == large.answer


async def test_what_is_not_there_deleted_or_of_another_tenant_is_unknown(store: ResponseStore) -> None:
    await store.put(TURN)
    with pytest.raises(ResponseUnknown, match="resp_2"):
        await store.get("resp_2", "t")
    with pytest.raises(ResponseUnknown):
        await store.get("resp_1", "another")
    with pytest.raises(ResponseUnknown):
        await store.delete("resp_1", "another")
    await store.delete("resp_1", "t")
    with pytest.raises(ResponseUnknown):
        await store.get("resp_1", "t")
    with pytest.raises(ResponseUnknown):
        await store.delete("resp_1", "t")


async def test_many_are_read_at_once_and_a_missing_one_is_named(store: ResponseStore) -> None:
    names = [f"resp_{i}" for i in range(40)]
    for name in names:
        await store.put(StoredResponse(id=name, tenant="t"))
    assert [turn.id for turn in await store.get_all(names, "t")] == names
    with pytest.raises(ResponseUnknown, match="resp_gone"):
        await store.get_all([*names, "resp_gone"], "t")


@pytest.mark.slow
async def test_a_response_expires(connection: Connection, subjects: Subjects) -> None:
    short = ResponseStore(connection, subjects, StoreLimits(ttl_s=1.0))
    await short.put(TURN)
    await ResponseStore(connection, subjects).put(StoredResponse(id="resp_stays", tenant="t"))
    deadline = time.monotonic() + 15
    while True:
        try:
            await short.get("resp_1", "t")
        except ResponseUnknown:
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    stream = f"OBJ_{subjects.bucket('responses')}"
    while len(await connection.subject_counts(stream, ">")) > 2:  # the other one: a chunk and a description
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert (await short.get("resp_stays", "t")).id == "resp_stays"


async def test_what_is_too_large_is_not_stored(connection: Connection, subjects: Subjects) -> None:
    small = ResponseStore(connection, subjects, StoreLimits(max_bytes=1000))
    with pytest.raises(ResponseNotStored, match="the limit is 1000") as caught:
        await small.put(StoredResponse(id="resp_1", answer=bytes(1000)))
    assert caught.value.reason == "too_large"


async def test_a_full_store_makes_room_by_the_oldest(connection: Connection, subjects: Subjects, store: ResponseStore) -> None:
    topology = replace(Topology(subjects), stored_bytes=400_000)
    await ensure_topology(connection, topology)
    for i in range(8):
        await store.put(StoredResponse(id=f"resp_{i}", answer=os.urandom(100_000)))
    assert (await store.get("resp_7", "_")).id == "resp_7"
    with pytest.raises(ResponseUnknown):
        await store.get("resp_0", "_")


async def test_a_store_that_does_not_answer_is_given_up_in_time(own_server: EmbeddedServer, subjects: Subjects) -> None:
    limits = StoreLimits(write_timeout_s=0.5, read_timeout_s=0.5)
    async with await Connection.connect(ConnectOptions(servers=(own_server.url,)), subjects=subjects) as connection:
        await ensure_topology(connection, Topology(subjects))
        store = ResponseStore(connection, subjects, limits)
        await store.put(TURN)
        await own_server.stop_async()
        async with asyncio.timeout(10):
            with pytest.raises(ResponseNotStored) as caught:
                await store.put(TURN)
            assert caught.value.reason in ("timeout", "unavailable")
            with pytest.raises(JetStreamError):
                await store.get("resp_1", "t")
