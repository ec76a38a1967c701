"""What one deployment sends from a server to another one, wherever the streams are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.jetstream.client import Connection
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Change, Delivery
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import work_consumer


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():
            await asyncio.sleep(0.02)


async def serves_as_one(near: Connection, far: Connection, names: Subjects) -> None:
    """Leases, placed work, requests, frames and control calls pass from one server to the other. The streams are there."""
    # A lease that is kept from the other server, and seen here.
    seen: list[Change] = []
    watching = asyncio.create_task(near.bucket(names.bucket("members")).watch(seen.append).run())
    held: list[bool] = []
    lease = LeaseKeeper(far, names.bucket("members"), names.worker_key("p", "w"), b"w", on_change=held.append)
    keeping = asyncio.create_task(lease.run())
    await lease.wait_held(30)
    await until(lambda: len({change.revision for change in seen if change.value == b"w"}) >= 3)
    assert held == [True]

    # Work that is placed here on a worker there, and a request that is asked there.
    await near.ensure_consumer(work_consumer(names, "p", "w"))
    got: list[Delivery] = []
    pulling = asyncio.create_task(far.pull(names.stream("WORK"), names.work_consumer("w"), got.append, credit=5).run())
    await near.publish(names.work("p", "w"), b"job", msg_id="1")
    await until(lambda: len(got) == 1)
    got[0].ack()
    await far.publish(names.req("p", "std"), b"asked there", msg_id="2")
    assert (await near.stream_state(names.stream("REQ"))).messages == 1, "stored once"

    # Frames are core messages.
    frames: list[bytes] = []
    await near.subscribe(names.out("i"), lambda message: frames.append(message.data))
    await near.barrier()
    async with asyncio.timeout(30):
        while not frames:
            far.send(names.out("i"), b"frame")
            await asyncio.sleep(0.05)
    for task in (watching, keeping, pulling):
        task.cancel()
    await asyncio.gather(watching, keeping, pulling, return_exceptions=True)
