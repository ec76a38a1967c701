"""A router over a real nats-server: it places, shares, sheds, forgets, explains, and is missed by nobody when it is gone.

The scheduler places at random; what the real one decides has tests of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.errors import DeadlineExceeded, JobCancelled, JobRefused
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import Explain, Explanation, Inspect, Inspection
from headrace.broker.messages.events import JobEvent, JobEvents
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.directory import publish_card
from headrace.broker.settings import IngressSettings, SessionSettings, Timing
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Delivery, Message
from headrace.jetstream.subjects import Subjects
from headrace.router.session.session import RouterSession
from headrace.router.session.window import RouterDeps
from headrace.router.settings import SessionOptions
from tests.conftest import Connect
from tests.integration.broker.test_job_path import CARD, POOL, collect, has_worker, job, nothing_stored
from tests.support.executor import ScriptedExecutor, expected
from tests.support.router.scheduler import RandomScheduler

TIMING = Timing(lease_ttl_s=1.5)


@dataclass
class Pool:
    """One pool under test: an ingress, and workers and routers that come and go, each with a connection of its own."""

    connect: Connect
    subjects: Subjects
    watching: Connection
    served: Ingress
    events: list[JobEvent] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def worker(self, name: str, *, slots: int = 8, step_s: float = 0.001) -> AsyncIterator[WorkerSession]:
        """Ends as a crash does: without a word."""
        connection = await self.connect()
        executor = ScriptedExecutor(step_s=step_s)
        member = WorkerMember(worker=name, pool=POOL, model="m", slots=slots)
        settings = SessionSettings(slots=slots, timing=TIMING)
        deps = WorkerDeps(messaging=connection, subjects=self.subjects, settings=settings)
        session = WorkerSession(deps, member, EnginePorts(executor=executor))
        executor.session = session
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(session.run()), tasks.create_task(executor.run())]
            await session.wait_registered(10)
            await has_worker(self.served)
            yield session
            await connection.close()
            for task in running:
                task.cancel()

    @contextlib.asynccontextmanager
    async def router(self, name: str, *, shed: float = 0.0, window: int = 2048) -> AsyncIterator[RouterSession]:
        """Ends as a crash does, unless it was drained."""
        connection = await self.connect()
        members = Members(connection, self.subjects, lease_ttl_s=TIMING.lease_ttl_s)
        deps = RouterDeps(
            messaging=connection,
            subjects=self.subjects,
            members=members,
            pool=POOL,
            router=name,
            options=SessionOptions(timing=TIMING, window=window),
        )
        session = RouterSession(deps, RandomScheduler(random.Random(1), shed=shed))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(members.run()), tasks.create_task(session.run())]
            await until(lambda: session.ready)
            yield session
            await connection.close()
            for task in running:
                task.cancel()

    async def ask(self, n: int = 5, **options: object) -> None:
        """One request from end to end."""
        request = job(n, **options)
        assert await collect(await self.served.submit(request)) == expected(request.id, 0, n)

    def placed_by(self, *, since: int = 0) -> list[str]:
        """Who placed, in order; `` for a worker on itself."""
        return [event.by for event in self.events[since:] if event.kind == "placed"]


async def until(met: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not met():
            await asyncio.sleep(0.01)


async def until_true(met: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await met():
            await asyncio.sleep(0.02)


class Silent:
    """A delivery that writes down what is said about it."""

    def __init__(self, delivery: Delivery, said: list[str]) -> None:
        self._delivery = delivery
        self._said = said

    def __getattr__(self, name: str) -> Any:
        if name in ("ack", "nak", "term"):
            self._said.append(name)
        return getattr(self._delivery, name)


@pytest.fixture
async def pool(connection: Connection, connect: Connect, subjects: Subjects) -> AsyncIterator[Pool]:
    await publish_card(connection, subjects, CARD, {"tokenizer.json": b"{}"})
    served = Ingress(connection, subjects, settings=IngressSettings(timing=TIMING))
    made = Pool(connect, subjects, connection, served)

    def on_events(message: Message) -> None:
        made.events.extend(decode(JobEvents, message.data).events)

    await connection.subscribe(subjects.events(POOL), on_events)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(served.run())
        await served.wait_started(10)
        yield made
        running.cancel()


async def test_a_router_places_every_request(pool: Pool) -> None:
    async with pool.worker("w1"), pool.worker("w2"), pool.router("r1"):
        await asyncio.gather(*(pool.ask() for _ in range(40)))
        await nothing_stored(pool.watching, pool.subjects)
    assert set(pool.placed_by()) == {"r1"}
    assert len(pool.placed_by()) == 40
    assert {event.worker for event in pool.events} == {"w1", "w2"}


async def test_a_window_of_waiting_requests_is_given_to_slots_as_they_become_free(pool: Pool) -> None:
    async with pool.worker("w1", slots=2), pool.router("r1") as router:
        waiting = [asyncio.ensure_future(pool.ask()) for _ in range(60)]
        await until(lambda: len(router.window) > 10)
        await asyncio.gather(*waiting)
        await nothing_stored(pool.watching, pool.subjects)
    assert set(pool.placed_by()) == {"r1"}


@pytest.mark.slow
async def test_without_the_router_workers_place_on_themselves_until_it_is_back(pool: Pool) -> None:
    async with pool.worker("w1"):
        async with pool.router("r1"):
            await pool.ask()
        since = len(pool.events)
        await pool.ask()
        await until(lambda: bool(pool.placed_by(since=since)))
        assert pool.placed_by(since=since) == [""]
        async with pool.router("r2"):
            since = len(pool.events)
            await pool.ask()
            assert pool.placed_by(since=since) == ["r2"]


@pytest.mark.slow
async def test_what_a_dead_router_held_is_answered_all_the_same(pool: Pool) -> None:
    async with pool.worker("w1", slots=1, step_s=0.002):
        async with pool.router("r1") as router:
            waiting = [asyncio.ensure_future(pool.ask(20)) for _ in range(20)]
            await until(lambda: len(router.window) > 5 and "r1" in pool.placed_by())
        await asyncio.gather(*waiting)
        await nothing_stored(pool.watching, pool.subjects)
    assert "" in pool.placed_by()


async def test_two_routers_share_the_work(pool: Pool) -> None:
    async with pool.worker("w1"), pool.worker("w2"), pool.router("r1", window=4), pool.router("r2", window=4):
        await asyncio.gather(*(pool.ask() for _ in range(80)))
        await nothing_stored(pool.watching, pool.subjects)
    assert set(pool.placed_by()) == {"r1", "r2"}


async def test_a_cancelled_request_leaves_the_window(pool: Pool) -> None:
    async with pool.worker("w1", slots=1), pool.router("r1") as router:
        busy = await pool.served.submit(job(1_000_000))
        await busy.rows()
        stream = await pool.served.submit(job())
        await until(lambda: len(router.window) == 1)
        stream.cancel()
        with pytest.raises(JobCancelled):
            await collect(stream)
        await until(lambda: len(router.window) == 0)

        async def gone() -> bool:
            return not await pool.watching.subject_counts(pool.subjects.stream("REQ"), ">")

        await until_true(gone)
        assert len(pool.placed_by()) == 1
        busy.cancel()
        await nothing_stored(pool.watching, pool.subjects)


async def test_a_shed_request_ends_once_with_its_reason(pool: Pool) -> None:
    async with pool.worker("w1"), pool.router("r1", shed=1.0):
        with pytest.raises(JobRefused, match="no room") as refused:
            await pool.ask()
        assert (refused.value.reason, refused.value.retry_after_s) == ("queue_full", 1.0)
        await nothing_stored(pool.watching, pool.subjects)
    assert pool.placed_by() == []


async def test_a_request_whose_deadline_passes_in_the_window_ends(pool: Pool) -> None:
    async with pool.worker("w1", slots=1), pool.router("r1"):
        busy = await pool.served.submit(job(1_000_000))
        await busy.rows()
        with pytest.raises(DeadlineExceeded):
            await pool.ask(deadline_s=0.3)
        busy.cancel()
        await nothing_stored(pool.watching, pool.subjects)


@pytest.mark.slow
async def test_the_work_of_a_dead_worker_is_moved_and_goes_on_where_it_was(pool: Pool) -> None:
    async with pool.router("r1"):
        async with pool.worker("w1", step_s=0.01):
            request = job(150)
            stream = await pool.served.submit(request)
            ids = [i for row in await stream.rows() for i in row.ids]
        async with pool.worker("w2", step_s=0.01):
            ids += await collect(stream)
            await nothing_stored(pool.watching, pool.subjects)
    assert ids == expected(request.id, 0, 150)
    assert [(event.attempt, event.worker) for event in pool.events if event.kind == "placed"] == [(1, "w1"), (2, "w2")]


async def test_a_drained_router_gives_back_what_waits_and_leaves(pool: Pool) -> None:
    async with pool.worker("w1", slots=1, step_s=0.002), pool.router("r1") as router:
        waiting = [asyncio.ensure_future(pool.ask(20)) for _ in range(20)]
        await until(lambda: len(router.window) > 5)
        await router.drain(5.0)
        assert len(router.window) == 0
        since = len(pool.events)
        await asyncio.gather(*waiting)
        await nothing_stored(pool.watching, pool.subjects)
    assert set(pool.placed_by(since=since)) == {""}


@pytest.mark.slow
async def test_a_router_that_lost_its_lease_decides_nothing_until_it_holds_it_again(pool: Pool) -> None:
    async with pool.worker("w1", slots=1) as worker, pool.router("r1") as router:
        busy = await pool.served.submit(job(1_000_000))
        await busy.rows()
        waiting = asyncio.ensure_future(pool.ask())
        await until(lambda: len(router.window) == 1)
        members = pool.watching.bucket(pool.subjects.bucket("members"))
        await members.put(pool.subjects.router_key(POOL, "r1"), b"somebody else", ttl_s=2.0)
        await until(lambda: not router.ready)
        await until(lambda: len(router.window) == 0)
        assert worker.runs.table.sequences == 1
        await until(lambda: router.ready)
        busy.cancel()
        await waiting
    assert set(pool.placed_by()) == {"r1"}


@pytest.mark.slow
async def test_a_router_that_stood_still_lets_go_of_its_window_without_a_word(pool: Pool) -> None:
    async with pool.worker("w1", slots=1), pool.router("r1") as router:
        busy = await pool.served.submit(job(1_000_000))
        await busy.rows()
        waiting = asyncio.ensure_future(pool.ask())
        await until(lambda: len(router.window) == 1)
        (held,) = router.window
        said: list[str] = []
        held.delivery = Silent(held.delivery, said)
        router.window._extended_s -= 60.0  # as if the clock had gone on without this process
        await until(lambda: held.gone)
        assert said == []
        busy.cancel()
        await waiting  # the server delivered it again


async def test_bytes_that_are_no_request_are_put_aside_and_the_router_goes_on(pool: Pool) -> None:
    async with pool.worker("w1"), pool.router("r1"):
        await pool.watching.publish(pool.subjects.req(POOL, "std"), b"\xc1 no msgpack")
        await pool.watching.publish(pool.subjects.req(POOL, "hi"), encode(Inspect()))
        pool.watching.send(pool.subjects.events(POOL), b"\xc1")
        pool.watching.send(pool.subjects.load(POOL, "w1"), b"\xc1")
        pool.watching.send(pool.subjects.cancel(POOL), b"\xc1")
        pool.watching.send(pool.subjects.control("r1"), b"\xc1")
        await pool.ask()
        await nothing_stored(pool.watching, pool.subjects)


async def test_it_says_why_it_placed_a_request_where_it_is(pool: Pool) -> None:
    async with pool.worker("w1"), pool.router("r1"):
        request = job()
        await collect(await pool.served.submit(request))
        control = pool.subjects.control("r1")
        told = decode(Explanation, await pool.watching.request(control, encode(Explain(id=request.id)), timeout_s=5))
        assert (told.known, told.router, told.worker, told.state) == (True, "r1", "w1", "placed")
        assert [candidate.worker for candidate in told.candidates] == ["w1"]
        nothing = decode(Explanation, await pool.watching.request(control, encode(Explain(id="other")), timeout_s=5))
        assert (nothing.known, nothing.router) == (False, "r1")
        looked = decode(Inspection, await pool.watching.request(control, encode(Inspect()), timeout_s=5))
        assert (looked.component, looked.lease_held, looked.draining) == ("r1", True, False)


@pytest.mark.slow
async def test_requests_of_an_ingress_that_is_gone_leave_the_window(pool: Pool, connect: Connect) -> None:
    async with pool.worker("w1", slots=1), pool.router("r1") as router:
        busy = await pool.served.submit(job(1_000_000))
        await busy.rows()
        other = await connect()
        second = Ingress(other, pool.subjects, settings=IngressSettings(timing=TIMING))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(second.run())
            await second.wait_started(10)
            await has_worker(second)
            await second.submit(job())
            await until(lambda: len(router.window) == 1)
            await other.close()
            running.cancel()
        await until(lambda: len(router.window) == 0)
        busy.cancel()
        await nothing_stored(pool.watching, pool.subjects)


async def test_an_ingress_is_told_by_the_router_that_placed_the_request(pool: Pool) -> None:
    async with pool.worker("w1"), pool.router("r1", window=4), pool.router("r2", window=4):
        for _ in range(8):
            request = job(explain=True)
            await collect(await pool.served.submit(request))
            told = await pool.served.explain(request.id, timeout_s=5.0)
            assert (told.known, told.worker) == (True, "w1")
            assert told.router == pool.placed_by()[-1]


@pytest.mark.slow
async def test_an_ingress_waits_for_no_explanation_that_cannot_come(pool: Pool) -> None:
    async with pool.worker("w1", slots=1) as worker:
        request = job(explain=True)
        await collect(await pool.served.submit(request))
        told = await pool.served.explain(request.id, timeout_s=5.0)
        assert (told.known, told.worker, told.reason) == (
            False,
            "w1",
            "no router was running: the worker took it itself",
        )
        assert not (await pool.served.explain(request.id, timeout_s=5.0)).known  # told once
        async with pool.router("r1"):
            request = job(explain=True)
            await collect(await pool.served.submit(request))
            # the answer may be here before the router has heard that its placement is stored, and said so
            await until(lambda: any(event.id == request.id and event.kind == "placed" for event in pool.events))
        told = await pool.served.explain(request.id, timeout_s=5.0)
        assert not told.known
        assert "does not answer" in told.reason
        await until(lambda: worker.runs.table.sequences == 0)
        busy = await pool.served.submit(job(1_000_000))
        await busy.rows()
        waiting = job(explain=True)
        stream = await pool.served.submit(waiting)
        told = await pool.served.explain(waiting.id, timeout_s=0.05)
        assert (told.known, told.reason) == (False, "nobody said in time who placed it")
        stream.cancel()
        busy.cancel()


async def test_a_router_that_is_silent_is_not_taken_for_a_placement_that_nobody_told(pool: Pool) -> None:
    async with pool.worker("w1", slots=1) as worker:
        busy = await pool.served.submit(job(1_000_000))
        await busy.rows()
        waiting = job(explain=True)
        stream = await pool.served.submit(waiting)
        await pool.watching.subscribe(pool.subjects.control("frozen"), lambda message: None)
        placed = JobEvent("placed", waiting.id, 1, "w1", by="frozen")
        pool.watching.send(pool.subjects.events(POOL), encode(JobEvents(events=[placed])))
        told = await pool.served.explain(waiting.id, timeout_s=0.3)
        assert (told.known, told.reason) == (False, "the router does not answer: frozen is silent")
        stream.cancel()
        busy.cancel()
        await until(lambda: worker.runs.table.sequences == 0)
