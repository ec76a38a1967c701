"""Requests that were refused for want of room or of a worker reach the planner as demand, over a real nats-server."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.codec import decode
from headrace.broker.errors import NoWorker, Overloaded
from headrace.broker.messages.events import Refused
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.planner.observe import DeploymentWatch, PoolKey
from tests.conftest import Connect
from tests.integration.broker.test_job_path import POOL, has_worker, ingress, job, worker

TRIES = 30
KEY = PoolKey(POOL)


async def test_each_request_that_finds_the_queue_full_is_demand_of_its_pool(connect: Connect, subjects: Subjects) -> None:
    connection = await connect(topology=Topology(subjects, tenant_cap=1))
    watch = DeploymentWatch(connection, subjects)
    await watch.start()
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1", step_s=0.05, slots=1):
        await has_worker(served)
        assert (await watch.observe())[KEY].refused == 0
        refused = 0
        for _ in range(TRIES):
            try:
                await served.submit(job(100_000))
            except Overloaded:
                refused += 1
        assert refused >= TRIES - 3
        told = 0
        async with asyncio.timeout(20):
            while told < refused:
                told += (await watch.observe())[KEY].refused
        assert told == refused
        assert (await watch.observe())[KEY].refused == 0, "each is demand once"
    await watch.stop()


async def test_a_request_that_no_worker_was_there_for_says_so(connection: Connection, subjects: Subjects) -> None:
    told: list[Refused] = []

    def hear(message: Message) -> None:
        told.append(decode(Refused, message.data))

    await connection.subscribe(subjects.refused(POOL), hear)
    async with ingress(connection, subjects, wait_s=0.0) as served:
        with pytest.raises(NoWorker):
            await served.submit(job())
        async with asyncio.timeout(20):
            while not told:
                await asyncio.sleep(0.01)
    assert told == [Refused(count=1, reason="no_worker")]
