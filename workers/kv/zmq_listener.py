"""Receives an engine's KV events over ZeroMQ on a socket to which the engine connects, and requests lost events again.

vLLM and SGLang have the same framing: topic, number of the batch (8 bytes, big endian, from 0 at the engine's start), payload.
The socket is bound to a free port of the loopback address, so there is no race for a port, and the engine cannot publish before
a reader is connected. Any process on this machine can connect to it, so messages without the worker's random topic are dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import structlog

from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import EngineError, EngineStartFailed
from headrace.workers.kit import reserve_port

log = structlog.get_logger()

HOST = "127.0.0.1"
KEPT_STEPS = 10_000  # batches that an engine keeps for replays
REPLAY_TIMEOUT_S = 5.0
_SIGNED_END = (-1).to_bytes(8, "big", signed=True)


Event = TypeVar("Event")


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The cache was cleared."""


class KvPayload(msgspec.Struct, Generic[Event], frozen=True, array_like=True):
    """The payload of a batch: `Event` is the engine's union of events, told apart by `type`."""

    ts: float
    events: list[Event]
    rank: int | None = None


BatchReader = Callable[[int, bytes], KvBatch]
"""Reads the payload of a batch, given its number. Returns a batch for any payload."""


class ReplayFailed(EngineError):
    """The engine did not replay lost KV events."""

    retriable = True


class ZmqKvListener:
    """Listens to an engine's KV events. Create it before the engine starts. Used on one event loop."""

    def __init__(self, replay_endpoint: str, *, engine: str, read_batch: BatchReader, topic: str, port: int = 0) -> None:
        """`replay_endpoint`: where the engine will answer for lost batches. `engine`: a name for people. `port` 0: a free one.

        Raises zmq.ZMQError if the port is taken.
        """
        import zmq.asyncio  # comes with the engines

        self._engine = engine
        self._read_batch = read_batch
        self._context = zmq.asyncio.Context()
        self.topic = topic
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)  # A slow reader must not lose events; an engine makes at most one batch per step.
        self._socket.subscribe(self.topic.encode())
        try:
            self._socket.bind(f"tcp://{HOST}:{port or '*'}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.port = int(self.endpoint.rpartition(":")[2])
        self.replay_endpoint = replay_endpoint
        self._closed = False
        self._read_before = False

    def meet(self) -> None:
        """Call it when the engine has started: the socket tells a publisher its topic only when the socket is used."""
        import zmq

        self._socket.getsockopt(zmq.EVENTS)

    async def read(self) -> AsyncGenerator[KvBatch]:
        """Yield batches as they arrive. The first give what is cached now, as far as the engine still keeps its history."""
        again, self._read_before = self._read_before, True
        expected = 0
        if not again:
            yield KvBatch([KvEvent(kind="cleared")], -1)
        else:
            kept = await self.replay(0)
            first = kept[0].number if kept else 0
            if first:
                log.warning("kv.history_incomplete", engine=self._engine, first=first)
            yield KvBatch([KvEvent(kind="cleared")], first - 1, partial=first > 0)
            for batch in kept:
                yield batch
            expected = kept[-1].number + 1 if kept else 0
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 3:
                number = int.from_bytes(frames[1], "big")
                if number > expected:
                    for batch in await self._missed(expected, number):
                        yield batch
                expected = max(expected, number + 1)
                yield self._read_batch(number, frames[2])

    async def _missed(self, start: int, end: int) -> list[KvBatch]:
        """Return the batches from number `start` to before `end`: dropped ones, or sent before the subscription took hold."""
        try:
            missed = [batch for batch in await self.replay(start) if batch.number < end]
        except ReplayFailed as error:
            log.warning("kv.batches_missed", engine=self._engine, first=start, last=end - 1, error=str(error))
            return []
        log.info("kv.missed_batches_read", engine=self._engine, first=start, last=end - 1, found=len(missed))
        return missed

    async def replay(self, start: int) -> list[KvBatch]:
        """Return the batches from number `start` on that the engine still keeps. Raises ReplayFailed."""
        import zmq

        if self._closed:
            return []
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        batches: list[KvBatch] = []
        try:
            socket.connect(self.replay_endpoint)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                while True:
                    _, _, number, payload = await socket.recv_multipart()
                    if number == _SIGNED_END:
                        return batches
                    batches.append(self._read_batch(int.from_bytes(number, "big"), payload))
        except (TimeoutError, zmq.ZMQError, ValueError) as error:
            raise ReplayFailed(f"{self._engine} did not replay its KV events from {start}: {error!r}") from error
        finally:
            socket.close(0)

    def close(self) -> None:
        """Stop receiving events. Readers end with an error or are cancelled by their owner."""
        if self._closed:
            return
        self._closed = True
        self._context.destroy(linger=0)


# Listens to the KV events of all data-parallel ranks of an engine, each on a socket of its own.
#
# vLLM and SGLang are told the address of rank 0 and count the ports of the other ranks from there. So the ports lie in a row;
# and with several ranks replays come over ports, too, because a path cannot be counted on. One topic serves all ranks.

_TRIES = 50


class RankListeners:
    """Listens to an engine's KV events. Create it before the engine starts. Used on one event loop."""

    def __init__(self, folder: Path, *, engine: str, read_batch: BatchReader, ranks: int = 1) -> None:
        """`folder` holds the socket for replays; only this user may be able to enter it. Raises EngineStartFailed."""
        self.topic = secrets.token_hex(8)
        self._reserved = ExitStack()
        replays = [f"ipc://{folder}/replay"]
        if ranks > 1:
            first = _reserve_row(self._reserved, ranks)
            replays = [f"tcp://{HOST}:{first + rank}" for rank in range(ranks)]
        try:
            self._listeners = _listen_in_a_row(replays, engine=engine, read_batch=read_batch, topic=self.topic)
        except EngineStartFailed:
            self._reserved.close()
            raise

    def config(self) -> dict[str, Any]:
        """Return the engine's settings for publishing where this listens."""
        first = self._listeners[0]
        return {
            "publisher": "zmq",
            "endpoint": first.endpoint,
            "replay_endpoint": first.replay_endpoint,
            "buffer_steps": KEPT_STEPS,
            "topic": self.topic,
        }

    def __getitem__(self, rank: int) -> ZmqKvListener:
        return self._listeners[rank]

    def meet(self) -> None:
        """Call it when the engine has started: the sockets tell a publisher its topic only when they are used."""
        self._reserved.close()
        for listener in self._listeners:
            listener.meet()

    def close(self) -> None:
        self._reserved.close()
        for listener in self._listeners:
            listener.close()


def _listen_in_a_row(replays: Sequence[str], *, engine: str, read_batch: BatchReader, topic: str) -> list[ZmqKvListener]:
    """Return a listener per replay address, at ports in a row. Raises EngineStartFailed."""
    import zmq

    for _ in range(_TRIES):
        row: list[ZmqKvListener] = []
        try:
            for replay in replays:
                port = row[0].port + len(row) if row else 0
                row.append(ZmqKvListener(replay, engine=engine, read_batch=read_batch, topic=topic, port=port))
        except (zmq.ZMQError, OverflowError):  # another process has a port of this row
            for listener in row:
                listener.close()
            continue
        return row
    raise EngineStartFailed(f"no {len(replays)} free ports in a row on {HOST} for KV events")


def _reserve_row(stack: ExitStack, ports: int) -> int:
    """Reserve so many ports in a row for the engine, and return the first. Raises EngineStartFailed."""
    for _ in range(_TRIES):
        with ExitStack() as attempt:
            try:
                first = reserve_port(attempt, HOST, 0)
                for port in range(first + 1, first + ports):
                    reserve_port(attempt, HOST, port)
            except (OSError, OverflowError):  # another process has a port of this row
                continue
            stack.enter_context(attempt.pop_all())
            return first
    raise EngineStartFailed(f"no {ports} free ports in a row on {HOST} for replays of KV events")
