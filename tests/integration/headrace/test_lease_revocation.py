"""A supervisor that has reaped a process takes the leases of that process away, and no other one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.broker.codec import encode
from headrace.broker.messages.members import IngressMember, RouterMember, WorkerMember
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.up.parts import Reaped
from headrace.up.reaped_parts import KnownLeases, revoke_all, revoke_leases

DEAD = WorkerMember(worker="a-1", pool="p", model="m", host=socket.gethostname(), pid=77, started=100.0)
REAPED = Reaped(77, 90.0)


async def join(connection: Connection, subjects: Subjects, member: WorkerMember, *, ttl_s: float | None = None) -> None:
    bucket = connection.bucket(subjects.bucket("members"))
    await bucket.put(subjects.worker_key("p", member.worker), encode(member), ttl_s=ttl_s)


@contextlib.asynccontextmanager
async def revoking(options: ConnectOptions, subjects: Subjects) -> AsyncIterator[asyncio.Queue[Reaped]]:
    reaped: asyncio.Queue[Reaped] = asyncio.Queue()
    task = asyncio.create_task(revoke_leases(options, subjects, reaped))
    try:
        yield reaped
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def connected(connection: Connection) -> None:
    async with asyncio.timeout(20):
        while not connection.connected:
            await asyncio.sleep(0.02)


async def until_state(connection: Connection, subjects: Subjects, state: str) -> None:
    bucket = connection.bucket(subjects.bucket("members"))
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(JetStreamError):
                if await bucket.state(subjects.worker_key("p", "a-1")) == state:
                    return
            await asyncio.sleep(0.02)


async def test_only_the_lease_of_that_process_goes(connection: Connection, subjects: Subjects) -> None:
    others = {
        "b-1": {"pid": 78},
        "c-1": {"host": "elsewhere"},
        "d-1": {"started": 50.0},  # an earlier process of that number, on a machine of the same name
    }
    await join(connection, subjects, DEAD)
    for worker, fields in others.items():
        await join(connection, subjects, msgspec.structs.replace(DEAD, worker=worker, **fields))
    bucket = connection.bucket(subjects.bucket("members"))
    await bucket.put(subjects.worker_key("p", "e-1"), b"not a member")
    assert await revoke_all(connection, subjects, KnownLeases(), REAPED)
    left = {entry.key.rpartition(".")[2] for entry in await bucket.entries("worker.>")}
    assert left == {*others, "e-1"}
    assert not await revoke_all(connection, subjects, KnownLeases(), REAPED)


async def test_a_lease_that_has_run_out_meanwhile_is_deleted_all_the_same(connection: Connection, subjects: Subjects) -> None:
    """Absent, it could come back as far as others can know; deleted, it cannot."""
    known = KnownLeases()
    known.learn(subjects.worker_key("p", "a-1"), encode(DEAD))
    assert await revoke_all(connection, subjects, known, REAPED)
    assert await connection.bucket(subjects.bucket("members")).state(subjects.worker_key("p", "a-1")) == "deleted"
    assert not await revoke_all(connection, subjects, known, REAPED), "it is deleted already"


async def test_a_router_loses_its_leases_in_all_pools_and_a_frontend_its_own(
    connection: Connection, subjects: Subjects
) -> None:
    bucket = connection.bucket(subjects.bucket("members"))
    mine = {"host": socket.gethostname(), "started": 100.0}
    router = {pool: RouterMember(router=f"r-{pool}", pool=pool, pid=77, **mine) for pool in ("p", "q")}
    for pool, member in router.items():
        await bucket.put(subjects.router_key(pool, member.router), encode(member))
    await bucket.put(subjects.router_key("p", "other"), encode(RouterMember(router="other", pool="p", pid=78, **mine)))
    await bucket.put(subjects.router_key("p", "old"), encode(RouterMember(router="old", pool="p")))  # of an older release
    await bucket.put(subjects.ingress_key("f"), encode(IngressMember(ingress="f", pid=79, **mine)))
    assert await revoke_all(connection, subjects, KnownLeases(), REAPED)
    assert await revoke_all(connection, subjects, KnownLeases(), Reaped(79, 90.0))
    assert {entry.key for entry in await bucket.entries(">")} == {"router.p.other", "router.p.old"}
    assert await bucket.state("router.q.r-q") == "deleted"


@pytest.mark.slow
async def test_a_worker_that_died_with_the_server_is_revoked_once_that_is_back(tmp_path: Path, subjects: Subjects) -> None:
    """The server is away for longer than the lease lasts."""
    server = EmbeddedServer(tmp_path / "nats")
    await server.start_async()
    options = ConnectOptions(servers=(server.url,))
    try:
        async with await Connection.connect(options, subjects=subjects) as connection:
            await ensure_topology(connection, Topology(subjects=subjects))
            async with revoking(options, subjects) as reaped:
                await join(connection, subjects, msgspec.structs.replace(DEAD, pid=1, worker="other"))
                await join(connection, subjects, DEAD, ttl_s=1.0)
                await asyncio.sleep(0.5)  # the watch has seen it
                server.kill()
                reaped.put_nowait(REAPED)
                await asyncio.sleep(1.5)
                await server.restart_async(timeout_s=20.0)
                await connected(connection)
                await ensure_topology(connection, Topology(subjects=subjects))  # as frontends do: leases are in memory
                await until_state(connection, subjects, "deleted")
    finally:
        server.kill()


async def test_a_death_before_there_was_a_server_is_no_trouble(subjects: Subjects) -> None:
    nowhere = dataclasses.replace(ConnectOptions(), servers=("nats://127.0.0.1:1",))
    async with revoking(nowhere, subjects) as reaped:
        reaped.put_nowait(REAPED)
        await asyncio.sleep(0.1)
    assert reaped.qsize() == 1
