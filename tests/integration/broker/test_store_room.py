"""Room in the stores of answers and records, on a real server: who stores very much makes room with its own only."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest

from headrace.broker.errors import ResponseNotStored, ResponseUnknown
from headrace.broker.ingress.response_store import TENANT, RecordIndex, ResponseStore, StoredResponse, StoreLimits
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import RequestTimeout
from headrace.jetstream.ports import StoredMessage
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

BYTES = 2_000_000
ONE = 20_000
AT_ONCE = 4


async def flood(stores: list[ResponseStore], tenant: str, count: int) -> None:
    """Store answers of a tenant at several frontends at once."""
    numbers = iter(range(count))

    async def store_more(store: ResponseStore) -> None:
        for number in numbers:
            await store.put(StoredResponse(id=f"resp_{tenant}_{number}", tenant=tenant, answer=os.urandom(ONE)))

    async with asyncio.TaskGroup() as group:
        for place in range(AT_ONCE):
            group.create_task(store_more(stores[place % len(stores)]))


async def left(store: ResponseStore, tenant: str, count: int) -> set[int]:
    """Return the numbers of a tenant's answers that can be read."""
    found = set()
    for number in range(count):
        with contextlib.suppress(ResponseUnknown):
            await store.get(f"resp_{tenant}_{number}", tenant)
            found.add(number)
    return found


@pytest.mark.parametrize("frontends", [1, 2])
async def test_a_tenant_that_fills_the_store_pushes_out_only_its_own_answers(
    connection: Connection, subjects: Subjects, frontends: int
) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES))
    stores = [ResponseStore(connection, subjects) for _ in range(frontends)]
    await flood(stores[-1:], "small", 20)
    await flood(stores, "large", 300)  # three times what the store takes
    assert await left(stores[0], "small", 20) == set(range(20))
    kept = await left(stores[0], "large", 300)
    assert 299 in kept
    assert 0 not in kept
    assert len(kept) >= BYTES // ONE // 2


async def test_two_that_fill_it_have_a_half_each(connection: Connection, subjects: Subjects) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES))
    stores = [ResponseStore(connection, subjects)]
    await flood(stores, "first", 150)
    await flood(stores, "second", 150)
    one, other = [len(await left(stores[0], tenant, 150)) for tenant in ("first", "second")]
    assert abs(one - other) <= 2 * AT_ONCE  # of those on their way it is not known yet whose they are
    assert one + other >= BYTES // ONE * 3 // 4


async def test_one_that_is_alone_may_use_nearly_all(connection: Connection, subjects: Subjects) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES))
    store = ResponseStore(connection, subjects)
    await flood([store], "t", 150)
    assert len(await left(store, "t", 150)) >= BYTES // ONE * 3 // 4


async def test_what_was_stored_before_a_frontend_began_counts_too(connection: Connection, subjects: Subjects) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES))
    await flood([ResponseStore(connection, subjects)], "small", 5)
    await flood([ResponseStore(connection, subjects)], "large", 90)
    late = ResponseStore(connection, subjects)
    await flood([late], "third", 30)
    assert await left(late, "small", 5) == set(range(5))
    assert await left(late, "third", 30) == set(range(30))


async def test_what_its_tenant_deletes_counts_no_longer(connection: Connection, subjects: Subjects) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES))
    store = ResponseStore(connection, subjects)
    await flood([store], "neat", 50)
    await flood([store], "large", 28)  # the store is nearly full, and what is there is known
    for number in range(45):
        await store.delete(f"resp_neat_{number}", "neat")
    await flood([store], "large", 120)
    assert await left(store, "neat", 50) == set(range(45, 50))


async def test_records_of_others_stay_as_well(connection: Connection, subjects: Subjects) -> None:
    await ensure_topology(connection, replace(Topology(subjects), record_bytes=200_000))
    index = RecordIndex(connection, subjects, ttl_s=60.0)
    for number in range(5):
        await index.put("chat", "small", str(number), os.urandom(1000))
    for number in range(400):
        await index.put("chat", "large", str(number), os.urandom(1000))
    assert len(await index.list("chat", "small")) == 5
    assert 80 <= len(await index.list("chat", "large")) <= 200
    await index.change("chat", "large", "399", lambda value: value + b"x")
    assert await index.get("chat", "large", "399") is not None


async def test_the_task_in_the_background_makes_room_before_anybody_waits_for_it(
    connection: Connection, subjects: Subjects
) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES // 5))
    store = ResponseStore(connection, subjects)
    for number in range(250):
        await store.put(StoredResponse(id=str(number), answer=os.urandom(1000)))
    stream = f"OBJ_{subjects.bucket('responses')}"
    before = (await connection.stream_state(stream)).bytes
    running = asyncio.create_task(store.room.run())
    try:
        async with asyncio.timeout(30):
            while (await connection.stream_state(stream)).bytes >= before:
                await asyncio.sleep(0.05)
    finally:
        running.cancel()


@pytest.mark.parametrize(("filled", "stored"), [(0.90, True), (0.96, False)])
async def test_no_answer_hangs_while_a_frontend_that_started_beside_a_full_store_still_reads_whose_answers_there_are(
    connection: Connection, subjects: Subjects, monkeypatch: pytest.MonkeyPatch, filled: float, stored: bool
) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES))
    await fill(connection, subjects, "large", int(filled * BYTES))
    reading, go_on, read = asyncio.Event(), asyncio.Event(), connection.subject_messages

    async def read_slowly(*args: Any, **options: Any) -> list[StoredMessage]:
        reading.set()
        await go_on.wait()
        return await read(*args, **options)

    monkeypatch.setattr(connection, "subject_messages", read_slowly)
    store = ResponseStore(connection, subjects, StoreLimits(write_timeout_s=0.5))
    running = asyncio.create_task(store.room.run())
    try:
        await asyncio.wait_for(reading.wait(), 30)
        refused = contextlib.nullcontext() if stored else pytest.raises(ResponseNotStored, match="not stored within")
        async with asyncio.timeout(30):
            with refused:
                await put_small(store, "while it reads")
            go_on.set()
            while not running.done():
                with contextlib.suppress(ResponseNotStored):  # the read may take longer than one answer waits
                    await put_small(store, "later")
                    break
        assert (await store.get("later", "small")).answer
    finally:
        running.cancel()


async def fill(connection: Connection, subjects: Subjects, tenant: str, size: int) -> None:
    """Store answers of a tenant up to so many bytes of the stream, as a server would have them, without making room."""
    objects, number = connection.objects(subjects.bucket("responses")), 0
    stream = f"OBJ_{subjects.bucket('responses')}"
    while (await connection.stream_state(stream)).bytes < size:
        async with objects.writer(f"resp_{tenant}_{number}", ttl_s=600) as writer:
            await writer.write(os.urandom(ONE // 4))
            await writer.commit(metadata={TENANT: tenant})
        number += 1


async def put_small(store: ResponseStore, name: str) -> None:
    await store.put(StoredResponse(id=name, tenant="small", answer=os.urandom(1000)))


async def test_a_deletion_that_fails_leaves_its_answer_counted(
    connection: Connection, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ensure_topology(connection, replace(Topology(subjects), stored_bytes=BYTES))
    store = ResponseStore(connection, subjects)
    await flood([store], "small", 5)
    await flood([store], "large", 70)
    real = store.room._place

    async def refuse(_key: str) -> None:
        raise RequestTimeout("no word from the server")

    monkeypatch.setattr(store.room, "_place", real._replace(delete=refuse))
    with pytest.raises(ResponseNotStored, match="no word"):
        await flood_until_refused(store)
    monkeypatch.setattr(store.room, "_place", real)
    await flood([store], "more", 60)
    assert await left(store, "small", 5) == set(range(5))


async def flood_until_refused(store: ResponseStore) -> None:
    for number in range(100):
        await store.put(StoredResponse(id=f"resp_extra_{number}", tenant="large", answer=os.urandom(ONE)))
