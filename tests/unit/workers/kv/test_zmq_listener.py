"""The socket that an engine's KV events come to, with the engine's half of it played by the test."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import pytest_asyncio

from headrace.workers.errors import EngineError, EngineStartFailed
from headrace.workers.kv import zmq_listener as subject
from headrace.workers.kv.zmq_listener import RankListeners, ZmqKvListener
from headrace.workers.vllm.events import read_batch

zmq = pytest.importorskip("zmq")  # comes with the engines
pytest.importorskip("zmq.asyncio")


END = (-1).to_bytes(8, "big", signed=True)


def payload(token: int) -> bytes:
    return msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [token]}], 0])


class Core:
    """Publishes, keeps, and answers questions for what it has kept."""

    def __init__(self, listener: ZmqKvListener) -> None:
        self.context = zmq.asyncio.Context()
        self.topic = listener.topic.encode()
        self.pub = self.context.socket(zmq.XPUB)  # a PUB that hears of its subscribers
        self.pub.connect(listener.endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(listener.replay_endpoint)
        self.kept: dict[int, bytes] = {}

    async def publish(self, number: int, *, lost: bool = False) -> None:
        self.kept[number] = payload(number)
        if not lost:
            await self.pub.send_multipart((self.topic, number.to_bytes(8, "big"), self.kept[number]))

    async def answer(self) -> None:
        client, _, start = await self.router.recv_multipart()
        for number, data in self.kept.items():
            if number >= int.from_bytes(start, "big"):
                await self.router.send_multipart((client, b"", self.topic, number.to_bytes(8, "big"), data))
        await self.router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest_asyncio.fixture
async def listener() -> AsyncIterator[ZmqKvListener]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's has too long a name for a socket
        made = ZmqKvListener(f"ipc://{folder}/replay", engine="an engine", read_batch=read_batch, topic="0a1b")
        yield made
        made.close()
        made.close()


@pytest_asyncio.fixture
async def core(listener: ZmqKvListener) -> AsyncIterator[Core]:
    made = Core(listener)
    yield made
    made.close()


async def met(listener: ZmqKvListener, core: Core) -> None:
    """Until the publisher knows who listens; without `meet` it would not be told."""
    async with asyncio.timeout(10):
        while not await core.pub.poll(20):
            listener.meet()
    assert await core.pub.recv() == b"\x01" + core.topic


async def test_batches_come_in_order_after_the_word_that_nothing_is_cached(listener: ZmqKvListener, core: Core) -> None:
    await met(listener, core)
    for number in range(3):
        await core.publish(number)
    async with asyncio.timeout(5), aclosing(listener.read()) as batches:
        seen = [await anext(batches) for _ in range(4)]
    assert [batch.number for batch in seen] == [-1, 0, 1, 2]
    assert [event.kind for event in seen[0]] == ["cleared"]
    assert [batch[0].hashes for batch in seen[1:]] == [[0], [1], [2]]


async def test_what_does_not_bear_our_topic_is_not_ours(listener: ZmqKvListener, core: Core) -> None:
    await met(listener, core)
    await core.pub.send_multipart((b"", (7).to_bytes(8, "big"), payload(7)))
    await core.pub.send_multipart((b"someone", (8).to_bytes(8, "big"), payload(8)))
    await core.publish(0)
    async with asyncio.timeout(5), aclosing(listener.read()) as batches:
        assert [(await anext(batches)).number for _ in range(2)] == [-1, 0]


async def test_lost_batches_can_be_had_again(listener: ZmqKvListener, core: Core) -> None:
    for number in range(5):
        await core.publish(number, lost=True)
    async with asyncio.timeout(5):
        missing, _ = await asyncio.gather(listener.replay(2), core.answer())
    assert [batch.number for batch in missing] == [2, 3, 4]


async def test_batches_that_were_sent_before_the_subscription_or_dropped_are_read_from_the_history(
    listener: ZmqKvListener, core: Core
) -> None:
    await met(listener, core)
    for number, lost in enumerate((True, True, False, True, False, False)):
        await core.publish(number, lost=lost)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks, aclosing(listener.read()) as batches:
        for _ in range(2):
            tasks.create_task(core.answer())
        seen = [await anext(batches) for _ in range(7)]
    assert [batch.number for batch in seen] == [-1, 0, 1, 2, 3, 4, 5]


async def test_a_hole_that_the_engine_does_not_fill_stays_one(
    listener: ZmqKvListener, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "REPLAY_TIMEOUT_S", 0.05)
    await met(listener, core)
    await core.publish(2)
    async with asyncio.timeout(5), aclosing(listener.read()) as batches:
        assert [(await anext(batches)).number for _ in range(2)] == [-1, 2]


@pytest.mark.parametrize("first", [0, 3])
async def test_a_second_reader_gets_the_whole_history_or_is_told_that_it_is_not_whole(
    listener: ZmqKvListener, core: Core, first: int
) -> None:
    async with aclosing(listener.read()) as batches:
        await anext(batches)
    for number in range(first, 5):
        await core.publish(number, lost=True)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks, aclosing(listener.read()) as batches:
        tasks.create_task(core.answer())
        seen = [await anext(batches) for _ in range(6 - first)]
    assert [batch.number for batch in seen] == [*range(first - 1, 5)]
    assert ([event.kind for event in seen[0]], seen[0].partial) == (["cleared"], first > 0)


async def test_silence_is_an_error(listener: ZmqKvListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "REPLAY_TIMEOUT_S", 0.05)
    with pytest.raises(EngineError, match="did not replay its KV events from 4"):
        await listener.replay(4)


def made(folder: Path, ranks: int) -> RankListeners:
    return RankListeners(folder, engine="an engine", read_batch=read_batch, ranks=ranks)


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def test_the_ports_lie_in_a_row_and_are_reserved_for_replays(tmp_path: Path) -> None:
    listeners = made(tmp_path, 3)
    try:
        for offset in range(3):
            assert port_of(listeners[offset].endpoint) == port_of(listeners[0].endpoint) + offset
            assert port_of(listeners[offset].replay_endpoint) == port_of(listeners[0].replay_endpoint) + offset
            with pytest.raises(OSError, match="in use"), socket.socket() as taker:
                taker.bind(("127.0.0.1", port_of(listeners[offset].replay_endpoint)))
    finally:
        listeners.close()


async def test_an_engine_with_one_rank_answers_for_lost_batches_on_a_path(tmp_path: Path) -> None:
    listeners = made(tmp_path, 1)
    assert listeners[0].replay_endpoint == f"ipc://{tmp_path}/replay"
    listeners.close()


async def test_the_events_of_each_rank_come_to_its_own_reader(tmp_path: Path) -> None:
    listeners = made(tmp_path, 2)
    engine = zmq.asyncio.Context()
    try:
        for rank in range(2):
            publisher = engine.socket(zmq.XPUB)
            publisher.connect(f"tcp://127.0.0.1:{port_of(listeners[0].endpoint) + rank}")
            async with asyncio.timeout(10):
                while not await publisher.poll(20):
                    listeners.meet()
            events = msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [100 + rank]}], rank])
            await publisher.send_multipart((listeners.topic.encode(), (0).to_bytes(8, "big"), events))
        for rank in range(2):
            async with asyncio.timeout(5), aclosing(listeners[rank].read()) as batches:
                seen = [await anext(batches) for _ in range(2)]
            assert [list(event.hashes) for event in seen[1]] == [[100 + rank]]
    finally:
        engine.destroy(linger=0)
        listeners.close()


async def test_a_row_in_which_a_port_is_taken_is_passed_over_and_nothing_is_left_open(tmp_path: Path) -> None:
    real, failures, opened = subject.ZmqKvListener, [2, 1], []

    def sometimes(*args: object, port: int = 0, **kwargs: object) -> object:
        if port and failures:
            failures.pop()
            raise zmq.ZMQError
        opened.append(real(*args, port=port, **kwargs))  # type: ignore[arg-type]
        return opened[-1]

    with mock.patch.object(subject, "ZmqKvListener", sometimes):
        listeners = made(tmp_path, 2)
    assert [one._closed for one in opened] == [True, True, False, False]
    listeners.close()
    with (
        mock.patch.object(subject, "ZmqKvListener", side_effect=zmq.ZMQError),
        pytest.raises(EngineStartFailed, match="2 free"),
    ):
        made(tmp_path, 2)
