"""Requests that wait for a first worker are shown with the time since which they are held, and the worker that starts."""

from __future__ import annotations

import time

from headrace.broker.part_state import PartState
from headrace.commands.control import live_workers
from headrace.commands.run import serve_probes
from headrace.console.readers import Readers, StartingWorker
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from tests.integration.broker.test_job_path import worker


async def test_held_requests_have_an_age_until_a_worker_serves(connection: Connection, subjects: Subjects) -> None:
    began = time.time()
    for _ in range(2):
        await connection.publish(subjects.req("p", "std"), b"unread")
    state = PartState("worker")
    state.starts("engine 'sim' is starting")
    starting = StartingWorker("worker-1", 7, 11, serve_probes("127.0.0.1", 0, state))
    readers = Readers(connection, subjects, processes=lambda: [starting])
    cold = await readers.deployment()
    assert cold["pools"]["p"]["waiting"] == {"std": 2}
    assert began - 1 <= cold["pools"]["p"]["since"] <= time.time() + 1
    assert cold["summary"]["deployment"]["starting"] == [["worker-1", 11, "engine 'sim' is starting"]]


async def test_of_a_pool_with_a_worker_no_age_is_looked_up(connection: Connection, subjects: Subjects) -> None:
    async with worker(connection, subjects, "w1"):
        (member,) = await live_workers(connection, subjects)
        registered = StartingWorker("w1", member.pid, 11)
        tables = await Readers(connection, subjects, processes=lambda: [registered]).deployment()
    assert tables["summary"]["deployment"]["starting"] == []
    assert [row["since"] for row in tables["pools"].values()] == [None]
