"""Messages that come twice or not at all, over a real nats-server: one visible answer, whole."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.broker import metrics
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.models.directory import publish_card
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.faults import publish_duplicates
from tests.integration.broker.test_job_path import CARD, collect, has_worker, ingress, job, nothing_stored, settled, worker
from tests.support.executor import expected


@pytest.mark.slow
async def test_tokens_whose_frames_were_dropped_are_fetched(connection: Connection, subjects: Subjects) -> None:
    """A subscription that drops messages, as a server does to a slow consumer: here two of three frames."""
    await publish_card(connection, subjects, CARD, {"tokenizer.json": b"{}"})
    served = Ingress(connection, subjects)
    rng, dropped, take = random.Random(5), 0, served._inbox.on_frame

    def on_frame(message: Message) -> None:
        nonlocal dropped
        if rng.random() < 2 / 3:
            dropped += 1
        else:
            take(message)

    served._inbox.on_frame = on_frame  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks, worker(connection, subjects, "w1") as session:
        running = tasks.create_task(served.run())
        await served.wait_started(10)
        await has_worker(served)
        requests = [job(60) for _ in range(4)]
        streams = [await served.submit(request) for request in requests]
        answers = await asyncio.gather(*map(collect, streams))
        assert answers == [expected(request.id, 0, 60) for request in requests]
        assert dropped > 20
        await settled(session)
        await nothing_stored(connection, subjects)
        running.cancel()


async def test_requests_and_placements_that_are_stored_twice_are_answered_once(
    connection: Connection, subjects: Subjects
) -> None:
    async with (
        ingress(connection, subjects) as served,
        worker(connection, subjects, "w1", step_s=0.005) as first,
        worker(connection, subjects, "w2", step_s=0.005) as second,
    ):
        await has_worker(served)
        repeating = asyncio.create_task(publish_duplicates(connection, subjects, for_s=1.0))
        await asyncio.sleep(0.05)
        requests = [job(40) for _ in range(8)]
        streams = [await served.submit(request) for request in requests]
        answers = await asyncio.gather(*map(collect, streams))
        assert answers == [expected(request.id, 0, 40) for request in requests]
        assert await repeating >= 8
        await settled(first)
        await settled(second)
        await nothing_stored(connection, subjects)


async def test_a_publisher_that_sends_the_same_request_twice_has_it_stored_once(
    connection: Connection, subjects: Subjects
) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1") as session:
        await has_worker(served)
        before = metrics.SETTLED.labels("done")._value.get()
        request = job(20)
        stream = await served.submit(request)
        open_request = served._requests.get(request.id)
        assert open_request is not None
        await served._submission.publish(request, open_request.body)
        assert await collect(stream) == expected(request.id, 0, 20)
        await settled(session)
        await nothing_stored(connection, subjects)
        assert metrics.SETTLED.labels("done")._value.get() == before + 1
