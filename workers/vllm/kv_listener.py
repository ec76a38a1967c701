"""Receives vLLM's KV events on a socket to which vLLM's engine core connects, and requests lost events again.

The socket is bound to a free port of the loopback address, so there is no race for a port and no event is lost before vLLM has
started. Any process on this machine can connect to it, so messages without the worker's random topic are dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import structlog
import zmq
import zmq.asyncio

from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import EngineError
from headrace.workers.vllm.events import read_batch

log = structlog.get_logger()

KEPT_STEPS = 10_000  # batches that vLLM keeps for replays
REPLAY_TIMEOUT_S = 5.0
_SIGNED_END = (-1).to_bytes(8, "big", signed=True)


class ReplayFailed(EngineError):
    """vLLM did not replay lost KV events."""

    retriable = True


class KvListener:
    """Listens to vLLM's KV events. Create it before vLLM starts, with `config()`. Used on one event loop."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the socket for replays; only this user may be able to enter it."""
        self._context = zmq.asyncio.Context()
        self._topic = secrets.token_hex(8).encode()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)  # A slow reader must not lose events; vLLM makes at most one batch per step.
        self._socket.subscribe(self._topic)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._replay = f"ipc://{folder}/replay"
        self._closed = False
        self._read_before = False

    def config(self) -> dict[str, Any]:
        """Return vLLM's `kv_events_config`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{self._port}",
            "replay_endpoint": self._replay,
            "buffer_steps": KEPT_STEPS,
            "topic": self._topic.decode(),
        }

    def meet(self) -> None:
        """Call it when vLLM has started: a socket tells a newcomer what it wants to hear only when it is itself looked at."""
        self._socket.getsockopt(zmq.EVENTS)

    async def read(self) -> AsyncGenerator[KvBatch]:
        """Batches in the order they arrive, the first one saying what is cached now, as far as vLLM can still tell."""
        again, self._read_before = self._read_before, True
        if not again:
            yield KvBatch([KvEvent(kind="cleared")], -1)
        else:
            kept = await self.replay(0)
            first = kept[0].number if kept else 0
            if first:
                log.warning("kv.history_incomplete", engine="vllm", first=first)
            yield KvBatch([KvEvent(kind="cleared")], first - 1, partial=first > 0)
            for batch in kept:
                yield batch
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 3:
                yield read_batch(int.from_bytes(frames[1], "big"), frames[2])

    async def replay(self, start: int) -> list[KvBatch]:
        """Return the batches from number `start` on that vLLM still keeps. Raises ReplayFailed."""
        if self._closed:
            return []
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        batches: list[KvBatch] = []
        try:
            socket.connect(self._replay)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                while True:
                    _, _, number, payload = await socket.recv_multipart()
                    if number == _SIGNED_END:
                        return batches
                    batches.append(read_batch(int.from_bytes(number, "big"), payload))
        except (TimeoutError, zmq.ZMQError, ValueError) as error:
            raise ReplayFailed(f"vLLM did not replay its KV events from {start}: {error!r}") from error
        finally:
            socket.close(0)

    def close(self) -> None:
        """Stop receiving events. Readers end with an error or are cancelled by their owner."""
        if self._closed:
            return
        self._closed = True
        self._context.destroy(linger=0)
