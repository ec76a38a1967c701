"""Objects that are written piece by piece: unfinished, paused, interrupted and swept ones, and large ones."""

import asyncio
import contextlib
import hashlib
import random
import time
import tracemalloc

import pytest

from headrace.jetstream import objects as object_writer
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ObjectError, ObjectNotFound, RequestTimeout
from headrace.jetstream.objects import CHUNK, ObjectInfo, ObjectStore
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.integration.jetstream.object_reads import chunk_counts


async def test_pieces_of_any_size_make_an_object(files: ObjectStore) -> None:
    data = random.Random(7).randbytes(5 * CHUNK + 321)
    async with files.writer("x") as writer:
        at = 0
        for size in (0, 1, CHUNK - 1, CHUNK, 3, 2 * CHUNK + 5, len(data)):
            await writer.write(memoryview(data)[at : at + size])
            at += size
        assert writer.size == len(data)
        with pytest.raises(ObjectNotFound):
            await files.info("x")
        stored = await writer.commit(metadata={"purpose": "batch"})
    assert (stored.size, stored.digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert await files.get("x") == data
    found = await files.info("x")
    assert found == stored
    assert dict(found.metadata) == {"purpose": "batch"}
    assert abs(found.stored - time.time()) < 60


@pytest.mark.parametrize("how", ["left", "raised", "cancelled"])
async def test_an_unfinished_object_leaves_nothing(
    connection: Connection, subjects: Subjects, files: ObjectStore, how: str
) -> None:
    async def write() -> None:
        with contextlib.suppress(LookupError):
            await leave()

    async def leave() -> None:
        async with files.writer("x") as writer:
            await writer.write(bytes(40 * CHUNK + 1))
            if how == "raised":
                raise LookupError
            if how == "cancelled":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1)

    await asyncio.wait([asyncio.ensure_future(write())])
    assert await chunk_counts(connection, subjects) == {}
    with pytest.raises(ObjectNotFound):
        await files.get("x")


async def test_a_closed_writer_takes_nothing_more(files: ObjectStore) -> None:
    async with files.writer("x") as writer:
        await writer.commit()
        with pytest.raises(ObjectError, match="closed"):
            await writer.write(b"more")
    assert await files.get("x") == b""


async def test_a_writer_that_paused_for_too_long_stores_nothing(files: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks may have been swept meanwhile."""
    async with files.writer("x") as writer:
        await writer.write(bytes(CHUNK))
        monkeypatch.setattr(object_writer, "LONGEST_PAUSE_S", -1.0)
        with pytest.raises(RequestTimeout, match="'x'"):
            await writer.commit()
    with pytest.raises(ObjectNotFound):
        await files.get("x")


async def test_an_object_goes_on_over_a_restart_of_the_server(  # type: ignore[no-untyped-def]
    own_server: EmbeddedServer, connect, subjects: Subjects
) -> None:
    connection = await connect(own_server, topology=Topology(subjects))
    files = connection.objects(subjects.bucket("files"))
    data = random.Random(10).randbytes(24 * CHUNK)
    async with files.writer("x") as writer:
        await writer.write(data[: 8 * CHUNK])
        own_server.pause()
        await writer.write(data[8 * CHUNK : 12 * CHUNK])  # on their way when the server dies
        own_server.kill()
        await own_server.start_async()
        await writer.write(data[12 * CHUNK :])
        await writer.commit()
    assert await files.get("x") == data


async def test_what_a_dead_writer_left_is_swept_and_nothing_else(
    connection: Connection, subjects: Subjects, files: ObjectStore
) -> None:
    data = random.Random(11).randbytes(3 * CHUNK)
    await files.put("kept", data)
    async with files.writer("open") as live:
        await live.write(bytes(CHUNK))
        dead = files.writer("dead")
        await dead.write(bytes(5 * CHUNK))
        while dead._publishing:
            await dead._stored()
        while live._publishing:
            await live._stored()
        assert await files.sweep(idle_s=3600.0) == 0  # all of them are young
        assert len(await chunk_counts(connection, subjects)) == 3
        assert await files.sweep(idle_s=0.0) == 2  # the live one, too: a writer must not pause for as long as `idle_s`
    assert list((await chunk_counts(connection, subjects)).values()) == [3]
    assert await files.get("kept") == data
    assert await files.sweep(idle_s=0.0) == 0


async def test_a_sweep_asks_the_leader_before_it_removes(
    connection: Connection, subjects: Subjects, files: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may come from a server that lags behind and has not seen the description."""
    await files.put("x", bytes(2 * CHUNK))

    async def stale() -> list[ObjectInfo]:
        return []

    monkeypatch.setattr(files, "_infos", stale)
    assert await files.sweep(idle_s=0.0) == 0
    assert await files.get("x") == bytes(2 * CHUNK)


@pytest.mark.slow
async def test_forty_megabytes_pass_in_bounded_memory(files: ObjectStore) -> None:
    size, piece = 40 * 1024 * 1024, bytes(64 * 1024)
    tracemalloc.start()
    try:
        async with files.writer("large") as writer:
            for _ in range(size // len(piece)):
                await writer.write(piece)
            await writer.commit()
        read = 0
        async for chunk in files.chunks("large"):
            read += len(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == size
    assert peak < 20 * 1024 * 1024
    await files.delete("large")
