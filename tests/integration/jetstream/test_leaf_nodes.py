"""Regions whose servers are joined by a leaf node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.up.parts import choose_port

NAMES, OTHERS = Subjects("hr"), Subjects("eu")


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """A server, and one that is joined to it as a leaf node; each has streams of its own."""
    port = choose_port("127.0.0.1", 0)
    hub = EmbeddedServer(
        folder / "hub", ServerSettings(extra=f'server_name: hub\nleafnodes {{\n  listen: "127.0.0.1:{port}"\n}}')
    )
    remote = f'remotes: [{{ url: "nats-leaf://127.0.0.1:{port}" }}]'
    leaf = EmbeddedServer(folder / "leaf", ServerSettings(extra=f"server_name: leaf\nleafnodes {{\n  {remote}\n}}"))
    async with contextlib.AsyncExitStack() as stack:
        for server in (hub, leaf):
            await server.start_async()
            stack.push_async_callback(server.stop_async)
        yield hub, leaf


async def hears(publisher: Connection, reader: Connection, subject: str) -> None:
    """Wait until what one sends reaches the other."""
    heard: list[bytes] = []
    subscription = await reader.subscribe(subject, lambda message: heard.append(message.data))
    async with asyncio.timeout(10):
        while not heard:
            publisher.send(subject, b"x")
            await asyncio.sleep(0.02)
    await subscription.unsubscribe()


async def stored(connection: Connection, names: Subjects) -> int:
    return (await connection.stream_state(names.stream("REQ"))).messages


async def test_joined_regions_keep_apart_under_prefixes_of_their_own_and_not_under_one(tmp_path: Path) -> None:
    """Under one prefix each stores what is asked at the other, as docs/operations.md warns: it would be answered twice."""
    async with (
        joined(tmp_path) as (hub, leaf),
        await Connection.connect(ConnectOptions(servers=(hub.url,)), subjects=NAMES) as near,
        await Connection.connect(ConnectOptions(servers=(leaf.url,)), subjects=OTHERS) as far,
    ):
        await hears(far, near, "joined")
        for names, here in ((NAMES, near), (OTHERS, far)):
            await ensure_topology(here, Topology(names))
            await here.publish(names.req("p", "std"), b"x")
        assert await stored(near, NAMES) == await stored(far, OTHERS) == 1
        ack = await far.publish(NAMES.job("p", "t"), b"x", msg_id="a")  # what a publisher sends from one region to the other
        assert (await near.get_message(NAMES.stream("JOB"), ack.seq)) is not None
        await ensure_topology(far, Topology(NAMES))  # a region under the prefix of the other
        async with asyncio.timeout(10):
            while not await stored(far, NAMES):
                await near.publish(NAMES.req("p", "std"), b"y")
        assert await stored(near, NAMES) > 1
