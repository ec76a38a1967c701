"""Each rank of an engine publishes its KV events to a socket of its own, at ports in a row."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from pathlib import Path
from unittest import mock

import msgspec
import pytest

pytest.importorskip("zmq")  # comes with the engines

import zmq
import zmq.asyncio

from headrace.workers.errors import EngineStartFailed
from headrace.workers.kv import rank_listeners as subject
from headrace.workers.kv.rank_listeners import RankListeners
from headrace.workers.vllm.events import read_batch


def made(folder: Path, ranks: int) -> RankListeners:
    return RankListeners(folder, engine="an engine", read_batch=read_batch, ranks=ranks)


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def test_the_ports_lie_in_a_row_and_are_reserved_for_replays(tmp_path: Path) -> None:
    listeners = made(tmp_path, 3)
    try:
        for offset in range(3):
            assert port_of(listeners[offset].endpoint) == port_of(listeners.endpoint) + offset
            assert port_of(listeners[offset].replay_endpoint) == port_of(listeners.replay_endpoint) + offset
            with pytest.raises(OSError, match="in use"), socket.socket() as taker:
                taker.bind(("127.0.0.1", port_of(listeners[offset].replay_endpoint)))
    finally:
        listeners.close()


async def test_an_engine_with_one_rank_answers_for_lost_batches_on_a_path(tmp_path: Path) -> None:
    listeners = made(tmp_path, 1)
    assert listeners.replay_endpoint == f"ipc://{tmp_path}/replay"
    listeners.close()


async def test_the_events_of_each_rank_come_to_its_own_reader(tmp_path: Path) -> None:
    listeners = made(tmp_path, 2)
    engine = zmq.asyncio.Context()
    try:
        for rank in range(2):
            publisher = engine.socket(zmq.XPUB)
            publisher.connect(f"tcp://127.0.0.1:{port_of(listeners.endpoint) + rank}")
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
