"""The job protocol over a real nats-server, with a scripted executor in place of an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from headrace.broker.errors import JobCancelled, JobRefused, NoWorker, Overloaded
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.ingress.stream import JobStream
from headrace.broker.jobs import Job, new_id
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Generation
from headrace.broker.models.cards import ModelCard
from headrace.broker.models.directory import publish_card
from headrace.broker.settings import IngressSettings, SessionSettings, Timing
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects, pool_id
from headrace.jetstream.topology import Topology
from tests.conftest import Connect
from tests.support.executor import ScriptedExecutor, expected

POOL = pool_id("m")
CARD = ModelCard(model="m", pool=POOL, context_length=4096, block_size=32)


def job(n: int = 8, **options: object) -> Job:
    generation = Generation(token_ids=b"\1\0\0\0")
    return Job(id=new_id(), card=CARD, generation=generation, prompt_tokens=1, max_tokens=n, **options)  # type: ignore[arg-type]


async def collect(stream: JobStream, choice: int = 0) -> list[int]:
    ids: list[int] = []
    async with asyncio.timeout(20):
        while not stream.finished:
            for row in await stream.rows():
                if row.choice == choice:
                    ids += row.ids
    return ids


@contextlib.asynccontextmanager
async def worker(
    connection: Connection,
    subjects: Subjects,
    name: str,
    *,
    step_s: float = 0.001,
    slots: int = 8,
    adapters: Sequence[str] = (),
    context: int = 0,
) -> AsyncIterator[WorkerSession]:
    executor = ScriptedExecutor(step_s=step_s)
    member = WorkerMember(worker=name, pool=POOL, model="m", slots=slots, adapters=list(adapters), max_model_len=context)
    deps = WorkerDeps(messaging=connection, subjects=subjects, settings=SessionSettings(slots=slots, timing=Timing()))
    session = WorkerSession(deps, member, EnginePorts(executor=executor))
    executor.session = session
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(session.run()), tasks.create_task(executor.run())]
        await session.wait_registered(10)
        yield session
        for task in running:
            task.cancel()


@contextlib.asynccontextmanager
async def ingress(connection: Connection, subjects: Subjects, *, wait_s: float = 10.0) -> AsyncIterator[Ingress]:
    await publish_card(connection, subjects, CARD, {"tokenizer.json": b"{}"})
    served = Ingress(connection, subjects, settings=IngressSettings(no_worker_wait_s=wait_s))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(served.run())
        await served.wait_started(10)
        yield served
        running.cancel()


async def has_worker(served: Ingress) -> None:
    async with asyncio.timeout(5):
        while not served.models.ready_names():
            await asyncio.sleep(0.01)


async def stored(connection: Connection, subjects: Subjects) -> int:
    total = 0
    for kind in ("REQ", "MOVED", "WORK"):
        total += sum((await connection.subject_counts(subjects.stream(kind), ">")).values())
    return total


async def settled(session: WorkerSession) -> None:
    async with asyncio.timeout(5):
        while len(session.runs.table):
            await asyncio.sleep(0.01)


async def nothing_stored(connection: Connection, subjects: Subjects) -> None:
    async with asyncio.timeout(5):
        while await stored(connection, subjects):
            await asyncio.sleep(0.02)


async def test_a_request_travels_to_the_worker_and_its_tokens_come_back(connection: Connection, subjects: Subjects) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1"):
        await has_worker(served)
        request = job(20)
        assert await collect(await served.submit(request)) == expected(request.id, 0, 20)
        await nothing_stored(connection, subjects)


async def test_choices_are_told_apart(connection: Connection, subjects: Subjects) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1"):
        await has_worker(served)
        request = job(5, choices=3)
        stream = await served.submit(request)
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while not stream.finished:
            for row in await stream.rows():
                got[row.choice] += row.ids
        assert got == {c: expected(request.id, c, 5) for c in range(3)}


async def test_a_large_payload_travels_through_the_object_store(connection: Connection, subjects: Subjects) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1"):
        await has_worker(served)
        generation = Generation(token_ids=b"\1\0\0\0" * 300_000)
        request = Job(id=new_id(), card=CARD, generation=generation, prompt_tokens=300_000, max_tokens=3)
        assert await collect(await served.submit(request)) == expected(request.id, 0, 3)


async def test_without_a_worker_a_request_is_refused_before_it_is_stored(connection: Connection, subjects: Subjects) -> None:
    async with ingress(connection, subjects, wait_s=0.0) as served:
        with pytest.raises(NoWorker, match="'m' has no ready worker"):
            await served.submit(job())
        assert await stored(connection, subjects) == 0


async def test_a_request_waits_in_the_queue_for_the_first_worker(connection: Connection, subjects: Subjects) -> None:
    async with ingress(connection, subjects, wait_s=60.0) as served:
        requests = [job(5) for _ in range(20)]
        streams = [await served.submit(request) for request in requests]
        assert await stored(connection, subjects) == 20
        async with worker(connection, subjects, "w1"):
            assert await asyncio.gather(*(collect(s) for s in streams)) == [expected(r.id, 0, 5) for r in requests]
            await nothing_stored(connection, subjects)


async def test_a_request_for_which_no_worker_comes_in_time_ends_and_leaves_the_queue(
    connection: Connection, subjects: Subjects
) -> None:
    """There is neither a router nor a worker that could take it out."""
    async with ingress(connection, subjects, wait_s=0.2) as served:
        stream = await served.submit(job())
        with pytest.raises(JobRefused, match="'m' has no ready worker") as refused:
            await collect(stream)
        assert (refused.value.reason, refused.value.retry_after_s) == ("no_worker", 1.0)
        await nothing_stored(connection, subjects)


async def test_a_client_that_leaves_while_there_is_no_worker_leaves_nothing(connection: Connection, subjects: Subjects) -> None:
    async with ingress(connection, subjects, wait_s=60.0) as served:
        (await served.submit(job())).cancel()
        await nothing_stored(connection, subjects)


async def test_a_request_waits_for_the_worker_that_has_its_adapter(connection: Connection, subjects: Subjects) -> None:
    """The worker without it gives the request back to the queue."""
    async with ingress(connection, subjects, wait_s=60.0) as served, worker(connection, subjects, "w1"):
        await has_worker(served)
        request = job(5, adapter="law")
        stream = await served.submit(request)
        await asyncio.sleep(0.5)
        async with worker(connection, subjects, "w2", adapters=["law"]):
            assert await collect(stream) == expected(request.id, 0, 5)
            await nothing_stored(connection, subjects)


async def test_without_a_router_a_request_that_is_too_long_for_one_fleet_is_passed_to_another(
    connection: Connection, subjects: Subjects
) -> None:
    """The worker with the short context would never answer what it takes."""
    async with (
        ingress(connection, subjects) as served,
        worker(connection, subjects, "w1", context=16, step_s=60.0) as short,
        worker(connection, subjects, "w2", context=64),
    ):
        await has_worker(served)
        async with asyncio.timeout(20):
            while len(short.presence.members.serving_workers(POOL)) < 2:
                await asyncio.sleep(0.01)
        for _ in range(6):
            request = job(40)
            assert await collect(await served.submit(request)) == expected(request.id, 0, 40)
        await nothing_stored(connection, subjects)


async def test_a_cancelled_request_is_stopped_and_not_delivered_again(connection: Connection, subjects: Subjects) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1", step_s=0.01) as session:
        await has_worker(served)
        stream = await served.submit(job(100_000))
        await stream.rows()
        stream.cancel()
        with pytest.raises(JobCancelled):
            await collect(stream)
        await settled(session)
        await nothing_stored(connection, subjects)


@pytest.mark.slow
async def test_a_drained_worker_hands_over_without_losing_or_repeating_a_token(
    connection: Connection, subjects: Subjects
) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1", step_s=0.01) as first:
        await has_worker(served)
        request = job(150)
        stream = await served.submit(request)
        ids = [i for row in await stream.rows() for i in row.ids]
        async with worker(connection, subjects, "w2", step_s=0.01) as second:
            await first.service.drain(0.0)
            ids += await collect(stream)
            await settled(second)
        assert ids == expected(request.id, 0, 150)


@pytest.mark.slow
async def test_many_requests_on_few_slots_all_end_exactly_once(connection: Connection, subjects: Subjects) -> None:
    async with (
        ingress(connection, subjects) as served,
        worker(connection, subjects, "w1", slots=3),
        worker(connection, subjects, "w2", slots=2),
    ):
        await has_worker(served)
        requests = [job(5) for _ in range(60)]
        streams = [await served.submit(r) for r in requests]
        results = await asyncio.gather(*(collect(s) for s in streams))
        assert results == [expected(r.id, 0, 5) for r in requests]
        await nothing_stored(connection, subjects)


async def test_a_full_queue_refuses_with_a_retry_time_and_stores_nothing_more(connect: Connect, subjects: Subjects) -> None:
    connection = await connect(topology=Topology(subjects, tenant_cap=2))
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1", step_s=0.05, slots=1):
        await has_worker(served)
        await served.submit(job(100_000))  # it takes the only slot, so that nothing leaves the queue while it is filled
        async with asyncio.timeout(10):
            while await connection.subject_counts(subjects.stream("REQ"), ">"):
                await asyncio.sleep(0.01)

        async def fill() -> None:
            for _ in range(30):
                await served.submit(job(100_000))

        with pytest.raises(Overloaded, match="queue of this model is full") as refused:
            await fill()
        assert refused.value.retry_after_s > 0
        assert refused.value.reason == "queue_full"
        assert sum((await connection.subject_counts(subjects.stream("REQ"), ">")).values()) == 2
        await served.submit(job(1, tenant="somebody-else"))
