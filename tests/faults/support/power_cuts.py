"""Cuts the power of nats-servers under load, and counts what they had acknowledged and have no more."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import ConsumerSpec, Delivery
from headrace.jetstream.provision import ensure_streams
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.subjects import Subjects
from tests.support.nats_cluster import NatsCluster
from tests.support.unsynced_disk import UnsyncedDisk

STREAM = "CUT"
SIZE = 1024
# A file of a stream has 8 MB. nats-server writes it anew once most of it, and 2 MB, are removed.
LARGE, OF_TWO_FILES, MOST_OF_THE_FIRST = 64 << 10, 200, 100
IN_FLIGHT = 16
DONE_OF_TEN = 1  # deliveries that their consumer acknowledges
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Loss:
    """`acknowledged` messages of which some were `due`, not yet done with; of these some are `lost`."""

    acknowledged: int
    due: int
    lost: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Powered:
    """Servers that lose their power together."""

    servers: Sequence[EmbeddedServer]
    disks: Sequence[UnsyncedDisk]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.servers)

    async def cut(self) -> None:
        for server in self.servers:
            server.kill()
        for disk in self.disks:
            await asyncio.to_thread(disk.cut)

    async def back(self) -> None:
        """Raises ServerStartError."""
        for disk in self.disks:
            await asyncio.to_thread(disk.start)
        await asyncio.gather(*(server.start_async(timeout_s=START_S) for server in self.servers))


@asynccontextmanager
async def powered(folder: Path, sync: str, *, servers: Literal[1, 3] = 1, strict: bool = False) -> AsyncIterator[Powered]:
    """Running nats-servers, each with its store on a disk of its own. Raises Unmountable."""
    async with AsyncExitStack() as stack:
        stores = [folder / "nats" / "store"] if servers == 1 else [folder / f"n{n + 1}" / "store" for n in range(servers)]
        disks = [stack.enter_context(UnsyncedDisk(store, strict=strict)) for store in stores]
        if servers == 1:
            server = EmbeddedServer(folder / "nats", ServerSettings(sync_interval=sync))
            stack.callback(server.kill)
            await server.start_async(timeout_s=START_S)
            yield Powered([server], disks)
        else:
            cluster = await stack.enter_async_context(NatsCluster(folder, sync_interval=sync))
            yield Powered(cluster.servers, disks)


async def loss(power: Powered, *, seconds: float) -> Loss:
    """Cut the power after so many seconds in which a work queue was filled, and read here and there."""
    load = _Load(copies=len(power.servers))
    async with connected(power) as connection:
        await load.prepare(connection)
        tasks = [asyncio.create_task(load.publish(connection)) for _ in range(IN_FLIGHT)]
        tasks.append(asyncio.create_task(load.consume(connection)))
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        await power.cut()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()
    due = load.acknowledged - load.done
    try:
        await power.back()
        async with connected(power) as connection:
            left = await stored(connection, STREAM)
    except JetStreamError as error:
        return Loss(len(load.acknowledged), len(due), len(due), str(error))
    return Loss(len(load.acknowledged), len(due), len(due - left))


async def lost_after_a_purge(power: Powered) -> int:
    """Cut the power just after the beginning of a stream was removed. Return how many of the other messages are lost."""
    spec = StreamSpec(name=STREAM, subjects=("cut.>",), description="loses its power")
    async with connected(power) as connection:
        await ensure_streams(connection, [spec])
        for number in range(OF_TWO_FILES):
            await connection.publish("cut.a", f"{number}".encode().ljust(LARGE, b"."))
        await connection.purge_stream(STREAM, up_to_seq=MOST_OF_THE_FIRST)
        await power.cut()
    await power.back()
    async with connected(power) as connection:
        return OF_TWO_FILES - MOST_OF_THE_FIRST - len(await stored(connection, STREAM))


@asynccontextmanager
async def connected(power: Powered) -> AsyncIterator[Connection]:
    async with await Connection.connect(ConnectOptions(servers=power.urls), subjects=Subjects()) as connection:
        yield connection


async def stored(connection: Connection, stream: str) -> set[int]:
    """Read all that is stored. In a cluster the stream may have to choose a leader first."""
    deadline = time.monotonic() + START_S * (len(connection.core.servers) > 1)
    while True:
        try:
            state = await connection.stream_state(stream)
            break
        except JetStreamError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
    found: set[int] = set()
    start = state.first_seq
    while messages := await connection.subject_messages(stream, "cut.>", limit=500, start_seq=start):
        found |= {_number(message.data) for message in messages}
        start = messages[-1].seq + 1
    return found


class _Load:
    def __init__(self, *, copies: int) -> None:
        self._stream = StreamSpec(
            name=STREAM, subjects=("cut.>",), description="loses its power", retention="workqueue", replicas=copies
        )
        self._numbers = itertools.count()
        self.acknowledged: set[int] = set()
        self.done: set[int] = set()

    async def prepare(self, connection: Connection) -> None:
        async with asyncio.timeout(START_S):
            await ensure_streams(connection, [self._stream])

    async def publish(self, connection: Connection) -> None:
        for number in self._numbers:
            try:
                await connection.publish("cut.a", f"{number}".encode().ljust(SIZE, b"."), timeout_s=5.0)
            except JetStreamError:
                continue
            self.acknowledged.add(number)

    async def consume(self, connection: Connection) -> None:
        await connection.ensure_consumer(
            ConsumerSpec(stream=STREAM, name="cut", filter_subjects=("cut.>",), ack_wait_s=60.0, max_ack_pending=5000)
        )

        def on_delivery(delivery: Delivery) -> None:
            number = _number(delivery.data)
            if number % 10 < DONE_OF_TEN:
                self.done.add(number)
                delivery.ack()
            loop.add_credit()

        loop = connection.pull(STREAM, "cut", on_delivery, credit=64)
        await loop.run()


def _number(data: bytes) -> int:
    return int(bytes(data).partition(b".")[0])
