"""Embeddings of media between an encode worker and those that serve, over a real nats-server, with a stand-in encoder."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from headrace.broker.codec import decode_worker_control, encode
from headrace.broker.messages.requests import EncodeMedia, Generation, MediaEncoded, Spill
from headrace.jetstream.client import Connection
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.ports import Message
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import EMBEDDINGS, Topology
from headrace.workers.encoding import server as server_module
from headrace.workers.encoding.server import EncodeServer, in_order, object_name, seal
from headrace.workers.encoding.source import EmbeddingSource, SourceDeps
from headrace.workers.engine import Sequence
from headrace.workers.errors import RequestInvalid
from headrace.workers.runtime.sequences import MediaOrigin
from tests.support.guarded_server import guarded_server

POOL = "p"
WORD = "stand-in/1"
SOON_S = 60.0


@dataclass
class Encoder:
    """Makes the upper case of an item of it."""

    asked: list[bytes] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def encode(self, item: Mapping[str, Any]) -> bytes:
        self.asked.append(item["data"])
        if self.gate is not None:
            await self.gate.wait()
        if item["data"] == b"bad":
            raise RequestInvalid("it cannot be read", param="messages")
        return bytes(item["data"].upper())


@asynccontextmanager
async def encode_worker(connection: Connection, subjects: Subjects, name: str, encoder: Encoder) -> AsyncIterator[None]:
    """What a worker in the role `encode` has of this, at its subject for peers."""
    server = EncodeServer(encoder, WORD, connection, subjects, pool=POOL)

    def on_control(message: Message) -> None:
        job = decode_worker_control(message.data)
        assert isinstance(job, EncodeMedia)
        server.begin(job, lambda answer: connection.send(message.reply, encode(answer)))

    subscription = await connection.subscribe(subjects.peer(POOL, name), on_control)
    running = asyncio.create_task(server.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        await subscription.unsubscribe()
        running.cancel()
        await asyncio.wait([running])


def media(*items: bytes, salt: str | None = None) -> Generation:
    made = [{"kind": "image", "data": data, "start": 10 * n, "length": 5} for n, data in enumerate(items)]
    return Generation(token_ids=b"", media=made, cache_salt=salt)


@dataclass
class World:
    connection: Connection
    subjects: Subjects
    encoders: list[str] = field(default_factory=lambda: ["e1"])

    def source(self, wait_s: float = SOON_S, clock: Callable[[], float] | None = None) -> EmbeddingSource:
        deps = SourceDeps(
            messaging=self.connection,
            subjects=self.subjects,
            pool=POOL,
            encoder=WORD,
            encoders=lambda: self.encoders,
            wait_s=wait_s,
        )
        return EmbeddingSource(replace(deps, clock=clock) if clock is not None else deps)

    async def fetch(
        self, source: EmbeddingSource, generation: Generation, *, cached: int = 0, spill: Spill | None = None
    ) -> dict[int, bytes]:
        sequence = Sequence(
            id="r1-1-0",
            token_ids=[1] * 100,
            prompt_tokens=100,
            sampling=generation.sampling,
            media=generation.media,
            cache_salt=generation.cache_salt,
            expected_cached=cached,
        )
        return dict(await source.fetch(sequence, MediaOrigin("r1", spill)))

    @property
    def store(self) -> Any:
        return self.connection.objects(self.subjects.pool_bucket(EMBEDDINGS, POOL))


@pytest_asyncio.fixture
async def world(connection: Connection, subjects: Subjects) -> World:
    await ensure_on_demand(connection, Topology(subjects).embeddings(POOL))
    return World(connection, subjects)


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_worker_{name}_total", labels) or 0.0


async def test_an_item_is_encoded_once_and_found_by_every_worker(world: World) -> None:
    encoder = Encoder()
    before = {source: count("embeddings", source=source) for source in ("encoder", "store", "kept", "here")}
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        one = world.source()
        assert await world.fetch(one, media(b"cat", b"dog")) == {0: b"CAT", 1: b"DOG"}
        assert await world.fetch(one, media(b"dog")) == {0: b"DOG"}
    assert await world.fetch(world.source(), media(b"dog", b"cat")) == {0: b"DOG", 1: b"CAT"}, "without an encode worker"
    assert sorted(encoder.asked) == [b"cat", b"dog"]
    after = {source: count("embeddings", source=source) - before[source] for source in before}
    assert after == {"encoder": 2, "kept": 1, "store": 2, "here": 0}


async def test_those_who_want_an_item_at_once_have_it_encoded_once(world: World) -> None:
    encoder = Encoder(gate=asyncio.Event())
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        sources = [world.source() for _ in range(3)]
        fetches = [asyncio.create_task(world.fetch(source, media(b"cat"))) for source in sources for _ in range(2)]
        async with asyncio.timeout(SOON_S):
            while not encoder.asked:
                await asyncio.sleep(0.01)
        assert encoder.gate is not None
        encoder.gate.set()
        assert await asyncio.gather(*fetches) == [{0: b"CAT"}] * 6
    assert len(encoder.asked) <= len(sources), (
        "in a worker one asks for all; in the encode worker those join who come meanwhile"
    )


async def test_what_the_cache_has_of_the_prompt_is_not_fetched(world: World) -> None:
    encoder = Encoder()
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        assert await world.fetch(world.source(), media(b"a", b"b", b"c"), cached=15) == {2: b"C"}
    assert encoder.asked == [b"c"]


async def test_the_embeddings_of_one_salt_are_not_those_of_another(world: World) -> None:
    encoder = Encoder()
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        source = world.source()
        for salt in (None, "one", "two"):
            assert await world.fetch(source, media(b"cat", salt=salt)) == {0: b"CAT"}
    assert encoder.asked == [b"cat"] * 3


async def test_a_large_request_is_read_from_where_it_lies(world: World) -> None:
    encoder, generation = Encoder(), media(b"small", b"X" * 3_000_000)
    payload = encode(generation)
    await world.connection.objects(world.subjects.bucket("spill")).put("lies-here", payload)
    spill = Spill("lies-here", len(payload), hashlib.sha256(payload).hexdigest())
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        found = await world.fetch(world.source(), generation, spill=spill)
    assert {number: len(data) for number, data in found.items()} == {0: 5, 1: 3_000_000}


@pytest.mark.parametrize("damage", ["another item's", "cut off", "nothing"])
async def test_a_damaged_object_is_encoded_anew(world: World, damage: str) -> None:
    encoder, name = Encoder(), object_name(WORD, None, "image", b"cat")
    record = {"another item's": seal("other", b"DOG"), "cut off": seal(name, b"CAT")[:-1], "nothing": b"?"}[damage]
    await world.store.put(name, record)
    before = count("embedding_failures", reason="damaged")
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        assert await world.fetch(world.source(), media(b"cat")) == {0: b"CAT"}
    assert count("embedding_failures", reason="damaged") == before + 1
    assert await world.fetch(world.source(), media(b"cat")) == {0: b"CAT"}, "the good one is in its place"


async def test_an_item_that_cannot_be_read_is_left_to_the_worker_that_serves(world: World) -> None:
    async with encode_worker(world.connection, world.subjects, "e1", Encoder()):
        assert await world.fetch(world.source(), media(b"bad", b"cat")) == {1: b"CAT"}


async def test_another_encode_worker_is_asked_when_the_first_is_gone(world: World) -> None:
    name = object_name(WORD, None, "image", b"cat")
    first, second = in_order(name, ["e1", "e2"])
    world.encoders = ["e1", "e2"]
    async with encode_worker(world.connection, world.subjects, second, encoder := Encoder()):
        assert await world.fetch(world.source(), media(b"cat")) == {0: b"CAT"}
    assert encoder.asked == [b"cat"]
    assert first != second


async def test_without_any_encode_worker_the_engine_encodes(world: World) -> None:
    before = count("embeddings", source="here")
    assert await world.fetch(world.source(), media(b"cat", b"dog")) == {}
    assert count("embeddings", source="here") == before + 2


async def test_a_silent_encode_worker_costs_the_wait_and_is_then_left_alone(world: World) -> None:
    encoder, now_s = Encoder(gate=asyncio.Event()), [100.0]
    before = count("embedding_failures", reason="encoder_lost")
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        source = world.source(wait_s=0.3, clock=lambda: now_s[0])
        assert await world.fetch(source, media(b"cat")) == {}
        assert await world.fetch(source, media(b"dog")) == {}
        assert encoder.asked == [b"cat"], "it was not asked again"
        assert count("embedding_failures", reason="encoder_lost") == before + 1
        assert encoder.gate is not None
        encoder.gate.set()
        now_s[0] += 1.5
        async with asyncio.timeout(SOON_S):
            while await world.fetch(source, media(b"cow")) != {0: b"COW"}:
                now_s[0] += 60.0


async def test_a_store_that_is_gone_costs_time_alone(world: World) -> None:
    before = count("embedding_failures", reason="store")
    await world.connection.api.call(f"STREAM.DELETE.OBJ_{world.subjects.pool_bucket(EMBEDDINGS, POOL)}")
    async with encode_worker(world.connection, world.subjects, "e1", Encoder()):
        assert await world.fetch(world.source(wait_s=5.0), media(b"cat")) == {}
    assert count("embedding_failures", reason="store") == before + 1


async def test_an_encode_worker_takes_a_bounded_number_of_items(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_WAITING", 2)
    encoder = Encoder(gate=asyncio.Event())
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        source = world.source()
        waiting = [asyncio.create_task(world.fetch(source, media(data))) for data in (b"a", b"b")]
        async with asyncio.timeout(SOON_S):
            while len(encoder.asked) < 2:
                await asyncio.sleep(0.01)
        assert await world.fetch(source, media(b"c")) == {}, "told at once"
        assert encoder.gate is not None
        encoder.gate.set()
        assert await asyncio.gather(*waiting) == [{0: b"A"}, {0: b"B"}]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "0" * 64}, "not the one that its name says"),
        ({"item": 7}, "none with the number 7"),
        ({"payload": encode(Generation(token_ids=b"", media=[{"kind": "image"}]))}, "no kind or no data"),
        ({"payload": b"\\xc1"}, "Generation"),
        ({"spill": Spill("nowhere", 3, "00")}, "is gone"),
    ],
)
async def test_a_job_that_is_not_what_it_says_is_refused(world: World, change: dict[str, Any], told: str) -> None:
    encoder = Encoder()
    job = EncodeMedia(id="r1", name=object_name(WORD, None, "image", b"cat"), payload=encode(media(b"cat")))
    given = {name: getattr(job, name) for name in ("id", "name", "item", "payload", "spill")} | change
    async with encode_worker(world.connection, world.subjects, "e1", encoder):
        reply = await world.connection.request(world.subjects.peer("p", "e1"), encode(EncodeMedia(**given)), timeout_s=SOON_S)
    from headrace.broker.codec import decode

    answer = decode(MediaEncoded, reply)
    assert not answer.ok
    assert told in answer.message
    assert encoder.asked == []


async def test_with_logins_two_workers_of_a_pool_may_do_all_that_this_takes(tmp_path: Path) -> None:
    login, names = Login("worker", POOL), Subjects("hr")
    encoder, before = Encoder(), count("embeddings", source="here")
    async with (
        guarded_server(tmp_path, [Login("operator"), login]) as guarded,
        await guarded.as_(login) as serving,
        await guarded.as_(login) as encoding,
    ):
        await ensure_on_demand(encoding, Topology(names).embeddings(POOL))  # as the first worker that uses it does
        world = World(serving, names)
        async with encode_worker(encoding, names, "e1", encoder):
            assert await world.fetch(world.source(), media(b"cat")) == {0: b"CAT"}
        assert await world.fetch(world.source(), media(b"cat")) == {0: b"CAT"}, "without an encode worker"
    assert encoder.asked == [b"cat"]
    assert count("embeddings", source="here") == before
