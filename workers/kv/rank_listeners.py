"""Listens to the KV events of all data-parallel ranks of an engine, each on a socket of its own.

vLLM and SGLang are told the address of rank 0 and count the ports of the other ranks from there. So the ports lie in a row; and
with several ranks replays come over ports, too, because a path cannot be counted on. One topic serves all ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import zmq

from headrace.workers.errors import EngineStartFailed
from headrace.workers.kv.zmq_listener import HOST, BatchReader, ZmqKvListener
from headrace.workers.reserved_port import reserve_port

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

    @property
    def endpoint(self) -> str:
        """Return the address to which rank 0 publishes."""
        return self._listeners[0].endpoint

    @property
    def replay_endpoint(self) -> str:
        """Return the address at which rank 0 answers for lost batches."""
        return self._listeners[0].replay_endpoint

    def __getitem__(self, rank: int) -> ZmqKvListener:
        return self._listeners[rank]

    def meet(self) -> None:
        """Call it when the engine has started: the sockets tell a publisher its topic only when they are used."""
        self._reserved.close()
        for listener in self._listeners:
            listener.meet()

    def close(self) -> None:
        """Stop receiving events."""
        self._reserved.close()
        for listener in self._listeners:
            listener.close()


def _listen_in_a_row(replays: Sequence[str], *, engine: str, read_batch: BatchReader, topic: str) -> list[ZmqKvListener]:
    """Return a listener per replay address, at ports in a row. Raises EngineStartFailed."""
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
