"""Requests that wait for a first worker are shown with the time since when they are held, and the worker that starts for them."""

from __future__ import annotations

import time

from headrace.console.overview_rows import StartingWorker
from headrace.console.readers import Readers
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from tests.integration.broker.test_job_path import worker


async def test_held_requests_have_an_age_until_a_worker_serves(connection: Connection, subjects: Subjects) -> None:
    began = time.time()
    for _ in range(2):
        await connection.publish(subjects.req("p", "std"), b"unread")
    starting = StartingWorker("worker-1", 7, 11)
    readers = Readers(connection, subjects, processes=lambda: [starting])
    cold = await readers.deployment()
    assert cold["pools"]["p"]["waiting"] == {"std": 2}
    assert began - 1 <= cold["pools"]["p"]["since"] <= time.time() + 1
    assert cold["summary"]["deployment"]["starting"] == [["worker-1", 11]]


async def test_of_a_pool_with_a_worker_no_age_is_looked_up(connection: Connection, subjects: Subjects) -> None:
    async with worker(connection, subjects, "w1"):
        tables = await Readers(connection, subjects).deployment()
    assert [row["since"] for row in tables["pools"].values()] == [None]
