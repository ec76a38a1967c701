"""Object stores against a real server, and the layout that the `nats` tool expects."""

import asyncio
import os
import random
from typing import Any

import nats
import pytest

from headrace.jetstream import objects
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ObjectCorrupt, ObjectNotFound, RequestTimeout, TopologyError
from headrace.jetstream.objects import CHUNK, CHUNKS_PER_STEP, INDEX, ObjectStore, encode_index, write_description
from headrace.jetstream.ports import ObjectBucket
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.integration.jetstream.object_reads import range_of


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK])
async def test_an_object_comes_back_as_it_was(files: ObjectStore, size: int) -> None:
    store: ObjectBucket = files
    data = os.urandom(size)
    digest = await store.put("a/b c.json", data)
    assert len(digest) == 64
    assert await store.get("a/b c.json") == data


async def test_a_large_object_is_read_in_several_pages(files: ObjectStore) -> None:
    """Trap 10: the plain client joins chunk by chunk, which is quadratic."""
    data = os.urandom(12 * 1024 * 1024 + 5)
    await files.put("large", data)
    assert await files.get("large") == data


async def test_a_new_version_replaces_the_old_and_frees_it(
    connection: Connection, subjects: Subjects, files: ObjectStore
) -> None:
    await files.put("x", bytes(3 * CHUNK))
    await files.put("x", b"new")
    assert await files.get("x") == b"new"
    counts = await connection.subject_counts(f"OBJ_{subjects.bucket('files')}", ">")
    assert sorted(counts.values()) == [1, 1]  # one chunk, one description
    await files.delete("x")
    await files.delete("x")
    with pytest.raises(ObjectNotFound, match="'x'"):
        await files.get("x")
    assert len(await connection.subject_counts(f"OBJ_{subjects.bucket('files')}", ">")) == 1


async def test_of_many_names_those_that_are_there_are_known_at_once(connection: Connection, files: ObjectStore) -> None:
    for name in ("a", "b", "gone"):
        await files.put(name, b"x")
    await files.delete("gone")
    absent = [f"n{number}" for number in range(1500)]
    assert await files.present([*absent, "a", "gone", "b"]) == {"a", "b"}
    assert await files.present([]) == set()
    with pytest.raises(TopologyError):
        await connection.objects("no_such_store").present(["a"])


async def test_an_object_that_never_was_is_named(connection: Connection, files: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound, match="nope"):
        await files.get("nope")
    with pytest.raises(TopologyError, match="no_such_store"):
        await connection.objects("no_such_store").get("x")


async def test_missing_chunks_are_noticed_at_once(connection: Connection, subjects: Subjects, files: ObjectStore) -> None:
    """Trap 10: the plain reader waits for ever for chunks that are gone."""
    await files.put("x", bytes(2 * CHUNK))
    info = await files._info("x")
    assert info is not None
    await connection.api.call(
        f"STREAM.PURGE.OBJ_{subjects.bucket('files')}", {"filter": f"$O.{subjects.bucket('files')}.C.{info.nuid}"}
    )
    with pytest.raises(ObjectCorrupt, match="0 bytes"):
        await files.get("x", timeout_s=5.0)


async def test_a_changed_byte_is_noticed(connection: Connection, subjects: Subjects, files: ObjectStore) -> None:
    await files.put("x", b"good")
    info = await files._info("x")
    assert info is not None
    chunks = f"$O.{subjects.bucket('files')}.C.{info.nuid}"
    await connection.api.call(f"STREAM.PURGE.OBJ_{subjects.bucket('files')}", {"filter": chunks})
    await connection.publish(chunks, b"evil")
    with pytest.raises(ObjectCorrupt, match="digest"):
        await files.get("x")


async def test_a_read_has_a_deadline(own_server: EmbeddedServer, connect, subjects: Subjects) -> None:  # type: ignore[no-untyped-def]
    connection = await connect(own_server, topology=Topology(subjects))
    files = connection.objects(subjects.bucket("files"))
    await files.put("x", b"data")
    own_server.pause()
    try:
        with pytest.raises(RequestTimeout, match="'x'"):
            await files.get("x", timeout_s=0.1)
    finally:
        own_server.resume()
    assert await files.get("x") == b"data"


async def test_a_cancelled_upload_leaves_no_chunks(connection: Connection, subjects: Subjects, files: ObjectStore) -> None:
    putting = asyncio.ensure_future(files.put("x", bytes(64 * CHUNK)))
    await asyncio.sleep(0.005)
    putting.cancel()
    await asyncio.wait([putting])
    await connection.barrier()
    with pytest.raises(ObjectNotFound):
        await files.get("x")


async def test_other_clients_read_what_we_write_and_we_what_they_write(
    nats_server: EmbeddedServer, subjects: Subjects, files: ObjectStore
) -> None:
    data = os.urandom(CHUNK + 7)
    await files.put("ours", data)
    plain = await nats.connect(nats_server.url)
    theirs = await plain.jetstream().object_store(subjects.bucket("files"))
    assert (await theirs.get("ours")).data == data
    assert [entry.name for entry in await theirs.list()] == ["ours"]
    await theirs.put("theirs", data)
    assert await files.get("theirs") == data
    await plain.close()


async def test_one_that_is_replaced_while_it_is_read_is_the_new_one(
    files: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks go as soon as the new description is there."""
    read, replacements = ObjectStore._page, [b"two" * 1000, b"three" * 1000]

    async def slow_read(self: ObjectStore, *page: Any) -> Any:
        if replacements:
            await self.put("x", replacements.pop(0))
        return await read(self, *page)

    await files.put("x", b"one" * 1000)
    monkeypatch.setattr(ObjectStore, "_page", slow_read)
    assert await files.get("x") == b"three" * 1000
    assert not replacements
    await files.put("y", b"one")

    async def read_deleted(self: ObjectStore, *page: Any) -> Any:
        await self.delete("y")
        return await read(self, *page)

    monkeypatch.setattr(ObjectStore, "_page", read_deleted)
    with pytest.raises(ObjectNotFound):
        await files.get("y")


async def test_a_range_is_read_without_the_chunks_behind_it(files: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(9).randbytes(20 * CHUNK)
    async with files.writer("x") as writer:
        await writer.write(data)
        await writer.commit()
    sizes: list[int] = []
    page = ObjectStore._page

    async def counted(self: ObjectStore, nuid: str, first: int, size: int, timeout_s: float) -> Any:
        sizes.append(size)
        return await page(self, nuid, first, size, timeout_s)

    monkeypatch.setattr(ObjectStore, "_page", counted)
    assert await range_of(files, "x", 3 * CHUNK - 2, 4) == data[3 * CHUNK - 2 :][:4]
    assert await range_of(files, "x", 3 * CHUNK, CHUNK) == data[3 * CHUNK :][:CHUNK]
    assert sizes == [2, 1]


@pytest.mark.parametrize("indexed", [True, False])
async def test_a_range_is_read_with_or_without_an_index(
    connection: Connection, subjects: Subjects, files: ObjectStore, indexed: bool
) -> None:
    data = random.Random(8).randbytes(20 * CHUNK + 11)
    async with files.writer("other") as other:  # its chunks lie between
        async with files.writer("x") as writer:
            for at in range(0, len(data), CHUNK):
                await writer.write(data[at : at + CHUNK])
                await other.write(bytes(CHUNK))
            await writer.commit()
        await other.commit()
    if not indexed:
        info = await files._info("x")
        assert info is not None
        info.metadata = {}
        await write_description(connection, files._subjects, info, None)
    for offset, length in [
        (0, 10),
        (CHUNK - 3, 6),
        (3 * CHUNK, CHUNK),
        (17 * CHUNK + 5, 3 * CHUNK),
        (20 * CHUNK, None),
        (5, None),
    ]:
        wanted = data[offset:] if length is None else data[offset : offset + length]
        assert await range_of(files, "x", offset, length) == wanted, (offset, length)
    assert await range_of(files, "x", len(data) + 1) == b""
    assert await range_of(files, "x", len(data) - 2, 500) == data[-2:]
    assert await range_of(files, "x", 7, 0) == b""
    assert await range_of(files, "x", 0) == data
    with pytest.raises(ValueError, match="negative"):
        await range_of(files, "x", -1)
    with pytest.raises(ObjectNotFound):
        await range_of(files, "y", 0)


async def test_a_range_reads_no_more_than_it_covers(files: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await files.put("x", bytes(64 * CHUNK))
    read = []
    batch = type(files._session.reader).batch

    async def counted(self: Any, stream: str, query: Any, *, timeout_s: float) -> Any:
        page = await batch(self, stream, query, timeout_s=timeout_s)
        read.extend(page)
        return page

    monkeypatch.setattr(type(files._session.reader), "batch", counted)
    assert len(await range_of(files, "x", 60 * CHUNK + 5, 100)) == 100
    assert len(read) <= CHUNKS_PER_STEP


@pytest.mark.parametrize("page", [2, 48])
async def test_chunks_that_were_stored_out_of_order_are_put_in_order(
    connection: Connection, files: ObjectStore, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """A chunk that is published again after a pause of the server may come to lie behind later ones."""
    monkeypatch.setattr(objects, "CHUNKS_PER_READ", page)
    data = random.Random(9).randbytes(4 * CHUNK)
    await files.put("x", data)
    info = await files._info("x")
    assert info is not None
    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    order = [0, 2, 1, 3]
    info.nuid = "reordered"
    acks = {}
    for number in order:
        acks[number] = (await connection.publish(f"$O.{files.name}.C.reordered", parts[number])).seq
    info.metadata[INDEX] = encode_index([acks[number] for number in range(4)])
    await write_description(connection, files._subjects, info, None)
    assert await files.get("x") == data
    assert await range_of(files, "x", CHUNK, CHUNK) == parts[1]


async def test_objects_are_listed_by_prefix_without_the_deleted_ones(files: ObjectStore) -> None:
    for name in ("a/1", "a/2", "b/1"):
        await files.put(name, name.encode())
    await files.delete("a/2")
    assert [found.name for found in await files.list("a/")] == ["a/1"]
    assert sorted(found.name for found in await files.list()) == ["a/1", "b/1"]


@pytest.mark.slow
async def test_an_object_with_a_life_of_its_own_goes_with_its_chunks(connection: Connection, subjects: Subjects) -> None:
    store = connection.objects(subjects.bucket("responses"))
    async with store.writer("x", ttl_s=1.0) as writer:
        await writer.write(bytes(2 * CHUNK))
        await writer.commit()
    assert (await store.info("x")).size == 2 * CHUNK
    async with asyncio.timeout(20):
        while await connection.subject_counts(f"OBJ_{store.name}", ">"):
            await asyncio.sleep(0.1)
