"""Object stores against a real server, and the layout that the `nats` tool expects."""

import asyncio
import os

import nats
import pytest

from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ObjectCorrupt, ObjectNotFound, RequestTimeout, TopologyError
from headrace.jetstream.objects import CHUNK, ObjectInfo, ObjectStore
from headrace.jetstream.ports import ObjectBucket
from headrace.jetstream.subjects import Subjects


@pytest.fixture
def files(connection: Connection, subjects: Subjects) -> ObjectStore:
    return connection.objects(subjects.bucket("files"))


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
    from headrace.jetstream.topology import Topology

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
    read, replacements = ObjectStore._read, [b"two" * 1000, b"three" * 1000]

    async def slow_read(self: ObjectStore, info: ObjectInfo, timeout_s: float) -> bytes:
        if replacements:
            await self.put("x", replacements.pop(0))
        return await read(self, info, timeout_s)

    await files.put("x", b"one" * 1000)
    monkeypatch.setattr(ObjectStore, "_read", slow_read)
    assert await files.get("x") == b"three" * 1000
    assert not replacements
    await files.put("y", b"one")

    async def read_deleted(self: ObjectStore, info: ObjectInfo, timeout_s: float) -> bytes:
        await self.delete("y")
        return await read(self, info, timeout_s)

    monkeypatch.setattr(ObjectStore, "_read", read_deleted)
    with pytest.raises(ObjectNotFound):
        await files.get("y")
