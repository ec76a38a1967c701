"""Embeddings of media read over real NIXL out of the memory of encode workers that are processes of their own.

Their stand-in encoder counts how often it is given an item, so that what was encoded twice shows.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from headrace.broker.messages.requests import Generation, LentRecord
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ObjectNotFound
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import EMBEDDINGS
from headrace.workers.encoding.lending import LentMemory, RecordReader
from headrace.workers.encoding.server import in_order, object_name
from headrace.workers.encoding.source import EmbeddingSource, Reading, SourceDeps
from headrace.workers.engine import Sequence
from headrace.workers.runtime.sequences import MediaOrigin
from tests.support.encode_process import POOL, WORD, EncodeProcess, embeddings
from tests.support.nixl_peer import needs_nixl

pytestmark = [needs_nixl]

WAIT_S = 30.0
LARGE = b"Large"

Start = Callable[[str], EncodeProcess]


@dataclass
class World:
    connection: Connection
    subjects: Subjects
    encoders: list[str] = field(default_factory=lambda: ["e1"])

    def source(self, reader: Reading | None, wait_s: float = WAIT_S) -> EmbeddingSource:
        return EmbeddingSource(
            SourceDeps(
                messaging=self.connection,
                subjects=self.subjects,
                pool=POOL,
                encoder=WORD,
                encoders=lambda: self.encoders,
                wait_s=wait_s,
                reader=reader,
            )
        )

    async def fetch(self, source: EmbeddingSource, *items: bytes) -> list[bytes | None]:
        media = [{"kind": "image", "data": data} for data in items]
        sequence = Sequence(
            id="r1-1-0", token_ids=[1], prompt_tokens=1, sampling=Generation(token_ids=b"").sampling, media=media
        )
        found = await source.fetch(sequence, MediaOrigin("r1"))
        return [found.get(number) for number in range(len(items))]

    async def is_stored(self, data: bytes) -> bool:
        try:
            await self.connection.objects(self.subjects.pool_bucket(EMBEDDINGS, POOL)).get(name_of(data))
        except ObjectNotFound:
            return False
        return True


@pytest.fixture(scope="module")
def shared(nats_server: EmbeddedServer) -> Iterator[Subjects]:
    """Where an encode worker runs for the tests that do not disturb it; each has items of its own."""
    subjects = Subjects(f"enc{os.getpid()}")
    process = EncodeProcess(nats_server.url, subjects.prefix, "e1")
    yield subjects
    process.stop()


@pytest_asyncio.fixture
async def world(nats_server: EmbeddedServer, shared: Subjects) -> AsyncIterator[World]:
    async with await Connection.connect(ConnectOptions(servers=(nats_server.url,), name="test"), subjects=shared) as made:
        yield World(made, shared)


@pytest_asyncio.fixture
async def own(connection: Connection, subjects: Subjects) -> World:
    """A world whose encode workers the test starts."""
    return World(connection, subjects)


@pytest.fixture
def start(nats_server: EmbeddedServer, subjects: Subjects) -> Iterator[Start]:
    started: list[EncodeProcess] = []

    def begin(name: str) -> EncodeProcess:
        started.append(EncodeProcess(nats_server.url, subjects.prefix, name))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


@asynccontextmanager
async def reading() -> AsyncIterator[RecordReader]:
    reader = RecordReader("serving", most_bytes=8 << 20)
    running = asyncio.create_task(reader.run())
    await asyncio.sleep(0)
    try:
        yield reader
    finally:
        running.cancel()
        await asyncio.wait([running])


@dataclass
class Disturbed:
    """A reader before which something happens to each offer, when the encode worker has answered."""

    reader: RecordReader
    disturb: Callable[[LentRecord], LentRecord]

    @property
    def most_bytes(self) -> int:
        return self.reader.most_bytes

    async def read(self, lent: LentRecord, *, timeout_s: float) -> bytes:
        return await self.reader.read(self.disturb(lent), timeout_s=timeout_s)


def name_of(data: bytes) -> str:
    return object_name(WORD, None, "image", data)


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_worker_{name}_total", labels) or 0.0


async def test_large_embeddings_are_read_from_memory_and_small_ones_go_by_the_store(world: World) -> None:
    before = {source: count("embeddings", source=source) for source in ("nixl", "encoder")}
    async with reading() as reader:
        assert await world.fetch(world.source(reader), b"Large 1") == [embeddings(b"Large 1")]
        assert await world.fetch(world.source(reader), b"small") == [embeddings(b"small")]
    assert [await world.is_stored(data) for data in (b"Large 1", b"small")] == [False, True]
    assert {source: count("embeddings", source=source) - before[source] for source in before} == {"nixl": 1, "encoder": 1}


async def test_what_lies_in_memory_is_not_encoded_again_for_others(world: World) -> None:
    async with reading() as one, reading() as other:
        for reader in (one, other, one):
            assert await world.fetch(world.source(reader), b"Large 2") == [embeddings(b"Large 2")]


async def test_many_items_are_read_at_once(world: World) -> None:
    items = [b"L%d" % number for number in range(12)]
    async with reading() as reader:  # whose memory has room for some of them at a time
        found = await world.fetch(world.source(reader), *items)
    assert [data is not None and data[: len(item)] == item for item, data in zip(items, found, strict=True)] == [True] * 12


async def test_a_worker_without_nixl_gets_the_same_by_the_store(world: World) -> None:
    async with reading() as reader:
        assert await world.fetch(world.source(reader), b"Large 3") == [embeddings(b"Large 3")]
    assert await world.fetch(world.source(None), b"Large 3") == [embeddings(b"Large 3")]
    assert await world.is_stored(b"Large 3")


async def test_what_is_larger_than_the_readers_memory_goes_by_the_store(world: World) -> None:
    item = b"L" * 90  # 9.4 MB
    async with reading() as reader:
        assert await world.fetch(world.source(reader), item) == [embeddings(item)]
    assert await world.is_stored(item)


async def test_memory_that_was_overwritten_meanwhile_is_noticed_and_costs_time_alone(world: World) -> None:
    before = count("embedding_failures", reason="damaged")

    def elsewhere(lent: LentRecord) -> LentRecord:
        return msgspec.structs.replace(lent, first=lent.first + 1)

    async with reading() as reader:
        assert await world.fetch(world.source(Disturbed(reader, elsewhere)), b"Large 4") == [embeddings(b"Large 4")]
    assert count("embedding_failures", reason="damaged") == before + 1


@pytest.mark.fault
async def test_when_it_is_killed_before_the_read_the_next_one_encodes_anew(own: World, start: Start) -> None:
    own.encoders = ["e1", "e2"]
    first, _ = (start(name) for name in in_order(name_of(LARGE), own.encoders))
    before = count("embedding_failures", reason="read")
    killed: list[str] = []

    def kill(lent: LentRecord) -> LentRecord:
        if not killed:
            first.signal(signal.SIGKILL)
            killed.append(first.name)
        return lent

    async with reading() as reader:
        assert await own.fetch(own.source(Disturbed(reader, kill)), LARGE) == [embeddings(LARGE)]
    assert killed == [first.name]
    assert count("embedding_failures", reason="read") == before + 1


@pytest.mark.fault
async def test_without_another_one_the_engine_encodes(own: World, start: Start) -> None:
    process = start("e1")

    def kill(lent: LentRecord) -> LentRecord:
        process.signal(signal.SIGKILL)
        return lent

    async with reading() as reader:
        assert await own.fetch(own.source(Disturbed(reader, kill)), LARGE) == [None]


@pytest.mark.fault
async def test_one_that_stands_still_during_a_read_costs_the_wait_and_is_read_again_later(
    own: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP the bytes do not come while the other process stands still; within one machine they would."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    process = start("e1")
    stopped: list[str] = []

    def stop(lent: LentRecord) -> LentRecord:
        if not stopped:
            stopped.append(process.name)
            process.signal(signal.SIGSTOP)
        return lent

    async with reading() as reader:
        assert await own.fetch(own.source(Disturbed(reader, stop), wait_s=2.0), LARGE) == [None]
        process.signal(signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            while await own.fetch(own.source(reader), LARGE) != [embeddings(LARGE)]:
                await asyncio.sleep(0.1)
    assert stopped == ["e1"]


async def test_there_is_no_room_for_a_record_in_place_of_one_that_may_just_be_read() -> None:
    memory = LentMemory("e1", least_bytes=1, most_bytes=4 << 16)
    running = asyncio.create_task(memory.run())
    await asyncio.sleep(0)
    try:
        first = await memory.lend("a", b"a" * (3 << 16))
        assert first is not None
        assert await memory.lend("b", b"b" * (2 << 16)) is None
        assert await memory.lend("c", b"c" * (5 << 16)) is None
        assert await memory.record(first) == b"a" * (3 << 16)
    finally:
        running.cancel()
        await asyncio.wait([running])
