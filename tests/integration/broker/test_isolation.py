"""A suspect that is to run alone gets a worker of its own in a moment, not when the longest of its neighbours has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.broker.codec import job_headers
from headrace.broker.jobs import Job
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.members import WorkerMember
from headrace.broker.protocol.run import Run
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from tests.integration.broker.test_job_path import POOL, collect, has_worker, ingress, job
from tests.support.executor import ScriptedExecutor, expected

NEIGHBOURS = 3
TOKENS = 200
STEP_S = 0.02  # so that a neighbour takes four seconds
TWO_CRASHES = [HistoryEntry(1, "w8#engine", 4), HistoryEntry(1, "w9#engine", 4)]


@contextlib.asynccontextmanager
async def slow_worker(
    connection: Connection, subjects: Subjects, name: str, *, slots: int, resumable: bool = True
) -> AsyncIterator[ScriptedExecutor]:
    class Executor(ScriptedExecutor):
        def resumable(self, run: Run) -> bool:
            return resumable

    executor = Executor(step_s=STEP_S)
    member = WorkerMember(worker=name, pool=POOL, model="m", slots=slots)
    deps = WorkerDeps(messaging=connection, subjects=subjects, settings=SessionSettings(slots=slots))
    session = WorkerSession(deps, member, EnginePorts(executor=executor))
    executor.session = session
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(session.run()), tasks.create_task(executor.run())]
        await session.wait_registered(10)
        yield executor
        for task in running:
            task.cancel()


async def until_started(executor: ScriptedExecutor, ids: set[str]) -> None:
    async with asyncio.timeout(10):
        while not ids <= set(executor.started):
            await asyncio.sleep(0.01)


async def place_as_suspect(connection: Connection, subjects: Subjects, request: Job, on: str) -> None:
    """As a router would after two of its workers have died."""
    (open_job,) = [one for one in await connection.subject_messages(subjects.stream("WORK"), ">", limit=20)
                   if request.id.encode() in one.data]  # fmt: skip
    await connection.publish(subjects.work(POOL, on), open_job.data, headers=job_headers(2, TWO_CRASHES), msg_id="second")


@contextlib.asynccontextmanager
async def crowded(
    connection: Connection, subjects: Subjects, *, room: int, resumable: bool = True
) -> AsyncIterator[tuple[list[asyncio.Task[list[int]]], list[Job], ScriptedExecutor, ScriptedExecutor]]:
    """`first` is busy with long jobs, and a suspect waits there; `second` has `room` besides that
    one's earlier attempt."""
    async with (
        ingress(connection, subjects) as served,
        slow_worker(connection, subjects, "w1", slots=NEIGHBOURS + 1, resumable=resumable) as first,
        asyncio.TaskGroup() as tasks,
    ):
        await has_worker(served)
        jobs = [job(TOKENS) for _ in range(NEIGHBOURS)]
        streams = [await served.submit(one) for one in jobs]
        await until_started(first, {one.id for one in jobs})
        assert first.session is not None
        first.session.intake.places = False  # the next one goes to the other
        first.session.presence.changed()
        async with slow_worker(connection, subjects, "w2", slots=room + 1) as second:
            jobs.append(job(TOKENS))
            streams.append(await served.submit(jobs[-1]))
            await until_started(second, {jobs[-1].id})
            answers = [tasks.create_task(collect(stream)) for stream in streams]
            await place_as_suspect(connection, subjects, jobs[-1], "w1")
            async with asyncio.timeout(10):
                while not first.session.runs.table.of(jobs[-1].id):
                    await asyncio.sleep(0.01)
            yield answers, jobs, first, second
            for answer in answers:
                answer.cancel()


@pytest.mark.slow
async def test_its_neighbours_go_on_elsewhere_where_there_is_room(connection: Connection, subjects: Subjects) -> None:
    async with crowded(connection, subjects, room=NEIGHBOURS) as (answers, jobs, first, second):
        await until_started(first, {jobs[-1].id})
        assert not any(answer.done() for answer in answers)
        for answer, one in zip(answers, jobs, strict=True):
            assert await answer == expected(one.id, 0, TOKENS)
        assert {one.id for one in jobs} <= set(second.started)
        assert first.started.count(jobs[-1].id) == 1


@pytest.mark.parametrize(("room", "resumable"), [(NEIGHBOURS - 1, True), (NEIGHBOURS, False)], ids=["room", "a way to go on"])
@pytest.mark.slow
async def test_they_stay_where_others_lack_and_it_starts_beside_them_in_the_end(
    connection: Connection, subjects: Subjects, room: int, resumable: bool
) -> None:
    async with crowded(connection, subjects, room=room, resumable=resumable) as (_, jobs, first, second):
        session = first.session
        assert session is not None
        await until_started(first, {jobs[-1].id})
        assert second.started == [jobs[-1].id]
        assert len(first.running) == NEIGHBOURS + 1
        (run,) = session.runs.table.suspects
        assert (run.id, run.limit) == (jobs[-1].id, 1)
