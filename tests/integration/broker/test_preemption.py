"""A batch request makes way for an interactive one on a full worker, and goes on where it stood."""

from __future__ import annotations

import msgspec
import pytest

from headrace.broker import metrics
from headrace.broker.messages.requests import HEADER_KEPT
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from tests.integration.broker.test_isolation import slow_worker, until_started
from tests.integration.broker.test_job_path import POOL, collect, has_worker, ingress, job
from tests.support.executor import expected

TOKENS = 60


@pytest.mark.slow
async def test_an_interactive_request_takes_the_slot_of_a_batch_request_which_loses_no_token(
    connection: Connection, subjects: Subjects
) -> None:
    before = metrics.PREEMPTED._value.get()
    async with ingress(connection, subjects) as served, slow_worker(connection, subjects, "w1", slots=2) as worker:
        await has_worker(served)
        batch = [msgspec.structs.replace(job(TOKENS), request_class="batch") for _ in range(2)]
        streams = [await served.submit(one) for one in batch]
        await until_started(worker, {one.id for one in batch})
        interactive = job(4)
        assert await collect(await served.submit(interactive)) == expected(interactive.id, 0, 4)
        assert not any(stream.finished for stream in streams)
        assert metrics.PREEMPTED._value.get() == before + 1
        for one, stream in zip(batch, streams, strict=True):
            assert await collect(stream) == expected(one.id, 0, TOKENS)
        assert sorted(worker.started.count(one.id) for one in batch) == [1, 2]
    assert await connection.subject_messages(subjects.stream("MOVED"), ">", limit=5) == []


@pytest.mark.slow
async def test_a_batch_request_that_a_router_has_placed_to_stay_keeps_its_slot(
    connection: Connection, subjects: Subjects
) -> None:
    async with ingress(connection, subjects) as served, slow_worker(connection, subjects, "w1", slots=1) as worker:
        await has_worker(served)
        session = worker.session
        assert session is not None
        session.intake.places = False
        session.presence.changed()
        one = msgspec.structs.replace(job(TOKENS), request_class="batch")
        stream = await served.submit(one)
        (stored,) = await connection.subject_messages(subjects.stream("REQ"), ">", limit=5)
        await connection.publish(subjects.work(POOL, "w1"), stored.data, headers={HEADER_KEPT: "1"}, msg_id="placed")
        await connection.delete_message(subjects.stream("REQ"), stored.seq)  # as a router's ack does, else it is placed again
        await until_started(worker, {one.id})
        (run,) = session.runs.table.of(one.id)
        assert run.kept
        session.intake.places = True
        session.presence.changed()
        other = job(4)
        assert await collect(await served.submit(other)) == expected(other.id, 0, 4)
        assert stream.finished or run.complete
        assert worker.started.count(one.id) == 1
