"""The tier in the broker's object store, with a real nats-server: silent, full or gone, it costs time alone."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.jetstream.client import Connection
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.core.api import ApiError
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.provision import ensure_on_demand, ensure_topology, plan, status
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import BLOCKS, Topology
from headrace.workers.vllm.tiers.block_record import DamagedBlock, seal
from headrace.workers.vllm.tiers.block_store import BlockAbsent, StoreFailed
from headrace.workers.vllm.tiers.object_store import ObjectBlockStore
from headrace.workers.vllm.tiers.transfers import Limits, Transfers
from tests.conftest import Connect

SIZE = 300_000  # three chunks of an object
POOL = "p"
SOON_S = 60.0  # the machine may be busy


def block(seed: int) -> bytes:
    return bytes([seed]) * SIZE


@contextmanager
def worker(server: EmbeddedServer, subjects: Subjects, *, wait_s: float = SOON_S) -> Iterator[Transfers]:
    """What one worker's engine has of the tier."""
    store = ObjectBlockStore(ConnectOptions(servers=(server.url,), name="kv", connect_timeout_s=1.0), subjects, pool=POOL)
    made = Transfers(store, size=SIZE, limits=Limits(wait_s=wait_s, write_s=wait_s, pause_s=0.2))
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def load(transfers: Transfers, *names: str) -> tuple[list[str], list[bytes]]:
    places = [bytearray(SIZE) for _ in names]
    transfers.load(1, names, [memoryview(place) for place in places])
    until(lambda: transfers.loaded)
    return list(transfers.loaded.popleft().names), [bytes(place) for place in places]


def store(transfers: Transfers, **blocks: bytes) -> None:
    """Store blocks and wait until they are stored."""
    transfers.store(list(blocks), [memoryview(data) for data in blocks.values()]).result(SOON_S)
    until(lambda: len(transfers.changes) >= len(blocks))
    transfers.changes.clear()


async def made(server: EmbeddedServer, subjects: Subjects, connect: Connect, **sizes: int) -> Connection:
    connection = await connect(server)
    topology = Topology(subjects, **sizes)  # type: ignore[arg-type]
    await ensure_topology(connection, topology)
    await ensure_on_demand(connection, topology.blocks(POOL))
    return connection


async def test_a_block_of_one_worker_is_loaded_by_another_and_after_a_restart(
    connection: Connection, nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    def work() -> None:
        with worker(nats_server, subjects) as first:
            store(first, **{"ns/a": block(1), "ns/b": block(2)})
        with worker(nats_server, subjects) as second:
            assert second.held(["ns/a", "ns/c", "ns/b"]) == [True, False, True]
            assert load(second, "ns/a", "ns/b") == (["ns/a", "ns/b"], [block(1), block(2)])
            assert not second.troubles()

    await asyncio.to_thread(work)


async def test_a_block_that_was_damaged_is_refused_and_goes(
    connection: Connection, nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    await ensure_on_demand(connection, Topology(subjects).blocks(POOL))
    objects = connection.objects(subjects.pool_bucket(BLOCKS, POOL))
    await objects.put("ns/a", seal("ns/b", block(1)))
    blocks = ObjectBlockStore(ConnectOptions(servers=(nats_server.url,)), subjects, pool=POOL)
    await objects.put("ns/c", block(3))
    info = await objects._info("ns/c")
    assert info is not None
    await connection.api.call(f"STREAM.PURGE.OBJ_{objects.name}", {"filter": f"$O.{objects.name}.C.{info.nuid}", "keep": 1})
    with pytest.raises(DamagedBlock):  # the server has dropped a part of it
        await blocks.read("ns/c")
    with pytest.raises(BlockAbsent):
        await blocks.read("ns/d")
    await blocks.close()

    def work() -> None:
        with worker(nats_server, subjects) as transfers:
            assert load(transfers, "ns/a", "ns/c") == ([], [bytes(SIZE), bytes(SIZE)])
            assert transfers.troubles() == {"damaged": 2}
            assert transfers.held(["ns/a", "ns/c"]) == [False, False]

    await asyncio.to_thread(work)


async def test_a_full_store_drops_its_oldest_blocks_and_takes_new_ones(
    connect: Connect, nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    connection = await made(nats_server, subjects, connect, block_bytes=4 * SIZE)
    names = [f"ns/{number}" for number in range(8)]

    def work() -> None:
        with worker(nats_server, subjects) as transfers:
            for number, name in enumerate(names):
                store(transfers, **{name: block(number)})
            held = transfers.held(names)
            assert held[-2:] == [True, True]
            assert not all(held)
            arrived, places = load(transfers, *names)
            assert set(arrived) <= {name for name, there in zip(names, held, strict=True) if there}
            assert {"ns/6", "ns/7"} <= set(arrived)
            for name, number, place in zip(names, range(8), places, strict=True):
                assert place == (block(number) if name in arrived else bytes(SIZE))

    await asyncio.to_thread(work)
    info = await connection.api.call(f"STREAM.INFO.OBJ_{subjects.pool_bucket(BLOCKS, POOL)}")
    assert info["state"]["bytes"] <= 4 * SIZE


async def test_a_store_that_refuses_every_block_costs_nothing_but_that(
    connect: Connect, nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    """The server's disk is full: what is there can still be read."""
    connection = await made(nats_server, subjects, connect)
    await ensure_on_demand(connection, Topology(subjects).blocks(POOL))
    await connection.objects(subjects.pool_bucket(BLOCKS, POOL)).put("ns/a", seal("ns/a", block(1)))
    stream = f"OBJ_{subjects.pool_bucket(BLOCKS, POOL)}"
    config = (await connection.api.call(f"STREAM.INFO.{stream}"))["config"]
    await connection.api.call(f"STREAM.UPDATE.{stream}", config | {"discard": "new", "max_bytes": SIZE + 20_000})

    def work() -> None:
        with worker(nats_server, subjects) as transfers:
            transfers.store(["ns/b"], [memoryview(block(2))]).result(SOON_S)
            until(lambda: transfers.troubles()["failed"])
            until(lambda: transfers.held(["ns/a", "ns/b"]) == [True, False])
            assert load(transfers, "ns/a") == (["ns/a"], [block(1)])

    await asyncio.to_thread(work)


@pytest.mark.slow
async def test_a_server_that_is_silent_is_waited_for_as_long_as_was_said_and_then_used_again(
    connect: Connect, own_server: EmbeddedServer, subjects: Subjects
) -> None:
    await made(own_server, subjects, connect)

    def work() -> None:
        with worker(own_server, subjects, wait_s=1.0) as transfers:
            until(lambda: transfers.held(["ns/x"]) == [False] and not transfers.troubles())
            transfers.store(["ns/a"], [memoryview(block(1))]).result(SOON_S)
            until(lambda: transfers.held(["ns/a"]) == [True])
            own_server.pause()
            assert transfers.held(["ns/a"]) == [False]
            until(lambda: load(transfers, "ns/a") == ([], [bytes(SIZE)]) and transfers.troubles()["late"])
            own_server.resume()
            until(lambda: load(transfers, "ns/a") == (["ns/a"], [block(1)]))

    await asyncio.to_thread(work)


@pytest.mark.slow
async def test_a_server_that_is_gone_has_nothing_and_is_used_again_when_it_is_back(
    connect: Connect, own_server: EmbeddedServer, subjects: Subjects
) -> None:
    await made(own_server, subjects, connect)

    def work() -> None:
        with worker(own_server, subjects) as transfers:
            store(transfers, **{"ns/a": block(1)})
            own_server.kill()
            until(lambda: transfers.held(["ns/a"]) == [False])
            assert load(transfers, "ns/a") == ([], [bytes(SIZE)])
            transfers.store(["ns/b"], [memoryview(block(2))]).result(SOON_S)
            own_server.start()
            until(lambda: load(transfers, "ns/a") == (["ns/a"], [block(1)]))

    await asyncio.to_thread(work)


async def test_a_server_that_never_was_is_a_failed_store(subjects: Subjects) -> None:
    blocks = ObjectBlockStore(ConnectOptions(servers=("nats://127.0.0.1:9",), connect_timeout_s=1.0), subjects, pool=POOL)
    for work in (blocks.held(["a"]), blocks.read("a"), blocks.write("a", b""), blocks.remove("a")):
        with pytest.raises(StoreFailed):
            await work
    await blocks.close()


async def test_the_store_is_made_by_the_first_worker_that_uses_it(
    connection: Connection, nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    """It sets 4 GiB of the server's disk aside, which a deployment without it keeps."""
    stream = Topology(subjects).blocks(POOL).name
    await ensure_topology(connection, Topology(subjects))
    with pytest.raises(ApiError, match="10059"):
        await connection.api.call(f"STREAM.INFO.{stream}")
    assert stream not in {one.stream for one in await plan(connection, Topology(subjects))}
    assert stream not in {one.stream for one in await status(connection, Topology(subjects))}
    blocks = ObjectBlockStore(ConnectOptions(servers=(nats_server.url,)), subjects, pool=POOL)
    assert list(await blocks.held(["a"])) == []
    await blocks.write("a", b"block")
    assert await blocks.read("a") == b"block"
    await blocks.close()
    assert stream in {one.stream for one in await status(connection, Topology(subjects))}


async def test_a_server_without_room_for_the_store_is_a_failed_store(tmp_path: Path, subjects: Subjects) -> None:
    with EmbeddedServer(tmp_path, ServerSettings(max_file_store="1GB")) as small:
        blocks = ObjectBlockStore(ConnectOptions(servers=(small.url,)), subjects, pool=POOL)
        for work in (blocks.held(["a"]), blocks.read("a"), blocks.write("a", os.urandom(10))):
            with pytest.raises(StoreFailed, match="no room"):
                await work
        await blocks.close()


def test_the_topology_has_a_bounded_store_that_forgets_the_oldest(subjects: Subjects) -> None:
    topology = Topology(subjects)
    (spec,) = [store for store in topology.pool_stores(POOL) if store.name == subjects.pool_bucket(BLOCKS, POOL)]
    config = dataclasses.replace(spec).stream().config()
    assert (config["discard"], config["max_bytes"], config["max_age"]) == ("old", 4 << 30, 24 * 3600 * 10**9)
