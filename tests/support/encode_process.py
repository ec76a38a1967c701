"""An encode worker in a process of its own, with a stand-in encoder and real memory that others read over NIXL."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection as Pipe
from typing import Any

from headrace.broker.codec import decode_worker_control, encode
from headrace.broker.messages.requests import EncodeMedia
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.ports import Message
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.encoding.lending import LentMemory
from headrace.workers.encoding.server import EncodeServer

PATIENCE_S = 60.0
POOL = "p"
WORD = "stand-in/1"
_context = multiprocessing.get_context("spawn")


def embeddings(data: bytes, time: int = 1) -> bytes:
    """What the stand-in makes of an item when it is given it for the first, second… time: much of items that begin with `L`."""
    made = data.upper() + b"%04d" % time
    return made * 100_000 if data.startswith(b"L") else made


class Encoder:
    """Counts how often it is given an item."""

    def __init__(self) -> None:
        self._given: Counter[bytes] = Counter()

    async def encode(self, item: Mapping[str, Any]) -> bytes:
        self._given[item["data"]] += 1
        return embeddings(item["data"], self._given[item["data"]])


def serve(pipe: Pipe, url: str, prefix: str, name: str) -> None:
    """Run the worker until something comes through the pipe."""
    asyncio.run(_serve(pipe, url, prefix, name))


async def _serve(pipe: Pipe, url: str, prefix: str, name: str) -> None:
    memory = LentMemory(name, least_bytes=64 << 10, most_bytes=16 << 20)
    subjects = Subjects(prefix)
    async with await Connection.connect(ConnectOptions(servers=(url,), name=name), subjects=subjects) as connection:
        await ensure_on_demand(connection, Topology(subjects).embeddings(POOL))
        server = EncodeServer(Encoder(), WORD, connection, subjects, pool=POOL, lending=memory)

        def on_control(message: Message) -> None:
            job = decode_worker_control(message.data)
            assert isinstance(job, EncodeMedia)
            server.begin(job, lambda answer: connection.send(message.reply, encode(answer)))

        await connection.subscribe(subjects.peer(POOL, name), on_control)
        await connection.api.call("INFO")  # so that the subscription is known by then
        running = [asyncio.create_task(part.run()) for part in (server, memory)]
        await asyncio.sleep(0)
        pipe.send("ready")
        while not pipe.poll():
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.wait(running)


class EncodeProcess:
    """The process as a test sees it. Ends with `stop`."""

    def __init__(self, url: str, prefix: str, name: str) -> None:
        self.name = name
        self._pipe, far_end = _context.Pipe()
        self._process = _context.Process(target=serve, args=(far_end, url, prefix, name), daemon=True)
        self._process.start()
        far_end.close()
        assert self._pipe.poll(PATIENCE_S), "the encode worker does not start"
        assert self._pipe.recv() == "ready"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after SIGKILL and SIGSTOP, see it work first."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:
            self._process.join(PATIENCE_S)
        elif number is signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> None:
        """End it, gently when it can hear."""
        if self._process.is_alive():
            try:
                os.kill(self._process.pid or 0, signal.SIGCONT)
                self._pipe.send("end")
                self._process.join(PATIENCE_S)
            except (BrokenPipeError, OSError):
                pass
        self._process.kill()
        self._process.join()
        self._pipe.close()
