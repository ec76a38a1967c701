"""A supervisor that has reaped a worker takes that worker's lease away, and no other one."""

from __future__ import annotations

import dataclasses
import socket

import msgspec

from headrace.broker.codec import encode
from headrace.broker.messages import WorkerMember
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.up.lease_revocation import announce_death, revoke_lease

DEAD = WorkerMember(worker="a-1", pool="p", model="m", host=socket.gethostname(), pid=77, started=100.0)


async def join(connection: Connection, subjects: Subjects, member: WorkerMember) -> None:
    await connection.bucket(subjects.bucket("members")).put(subjects.worker_key("p", member.worker), encode(member))


async def test_only_the_lease_of_that_process_goes(connection: Connection, subjects: Subjects) -> None:
    others = {
        "b-1": {"pid": 78},
        "c-1": {"host": "elsewhere"},
        "d-1": {"started": 50.0},  # an earlier process of that number, on a machine of the same name
    }
    for worker, fields in others.items():
        await join(connection, subjects, msgspec.structs.replace(DEAD, worker=worker, **fields))
    await join(connection, subjects, DEAD)
    bucket = connection.bucket(subjects.bucket("members"))
    await bucket.put(subjects.worker_key("p", "e-1"), b"not a member")
    assert await revoke_lease(connection, subjects, pid=77, started=90.0)
    left = {entry.key.rpartition(".")[2] for entry in await bucket.entries("worker.>")}
    assert left == {*others, "e-1"}
    assert not await revoke_lease(connection, subjects, pid=77, started=90.0)


async def test_a_server_that_is_away_is_no_trouble(subjects: Subjects) -> None:
    nowhere = dataclasses.replace(ConnectOptions(), servers=("nats://127.0.0.1:1",))
    assert not await announce_death(nowhere, subjects, pid=77, started=90.0)
