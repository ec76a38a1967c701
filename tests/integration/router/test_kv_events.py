"""A whole worker with the simulator on a real nats-server: what its stream says is what its engine has."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog

from headrace.broker.blocks import block_chain
from headrace.broker.codec import decode, encode, pack_u32, pack_u64
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.jobs import Job, new_id
from headrace.broker.messages.control import Done, Inspect, Inspection, KvDump
from headrace.broker.messages.events import JobEvent, JobEvents, LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Generation, Sampling
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects, pool_id
from headrace.jetstream.topology import Topology
from headrace.workers import main as workers_main
from headrace.workers.engine import Capabilities, Sequence
from headrace.workers.errors import RegistrationRefused
from headrace.workers.settings import WorkerSettings
from headrace.workers.sim.engine import SimEngine
from tests.conftest import Connect
from tests.support.router.kv_reader import KvReader

SIZE = 4
POOL = pool_id("m")
ARGS: dict[str, Any] = {"block_size": SIZE, "blocks": 64, "context_length": 200, "host_blocks": 24, "slots": 8}


class Worker:
    """A worker in this process, and the engine inside it."""

    def __init__(self, connection: Connection, subjects: Subjects, engine: SimEngine) -> None:
        self.connection, self.subjects, self.engine = connection, subjects, engine
        self._numbers = 0
        self._name = ""

    @property
    def held(self) -> dict[str, set[int]]:
        """What the engine has cached: the simulator's hashes are chain values."""
        scheduler = self.engine._scheduler
        assert scheduler is not None
        held: dict[str, set[int]] = {}
        for event in scheduler.manager.inventory():
            held.setdefault(event.tier, set()).update(event.hashes)
        return held

    async def compute(self, *prompts: list[int]) -> None:
        """Beside the broker: only the cache matters."""
        for prompt in prompts:
            self._numbers += 1
            sampling = Sampling(max_tokens=6)
            await self.engine.submit(
                Sequence(id=f"x{self._numbers}", token_ids=prompt, prompt_tokens=len(prompt), sampling=sampling)
            )
        async with asyncio.timeout(10):
            while self.engine.load().running or self.engine.load().waiting:
                await asyncio.sleep(0.001)

    async def member(self) -> WorkerMember:
        (entry,) = await self.connection.bucket(self.subjects.bucket("members")).entries("worker.>")
        return decode(WorkerMember, entry.value)

    async def reader(self) -> KvReader:
        """One that has read the whole stream."""
        reader = KvReader()
        self._name = self._name or (await self.member()).worker
        subject = self.subjects.kv(POOL, self._name)
        for message in await self.connection.subject_messages(self.subjects.stream("KV"), subject, limit=100_000):
            reader.take(message.data)
        return reader

    async def until(self, condition: Callable[[KvReader], bool]) -> KvReader:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(JetStreamError):  # a server that has just come back has no streams yet
                    if condition(reader := await self.reader()):
                        return reader
                await asyncio.sleep(0.02)

    async def until_exact(self) -> KvReader:
        def exact(reader: KvReader) -> bool:
            return reader.blocks is not None and {t: v for t, v in reader.blocks.items() if v} == self.held

        return await self.until(exact)

    async def ask(self, question: KvDump | Inspect) -> bytes:
        worker = (await self.member()).worker
        return await self.connection.request(self.subjects.control(worker), encode(question), timeout_s=2.0)


def settings(**options: Any) -> WorkerSettings:
    args = ARGS | options.pop("args", {})
    return WorkerSettings(engine="sim", model="m", served_name="m", engine_args=args, drain_grace_s=0.0, **options)


@contextlib.asynccontextmanager
async def working(
    connection: Connection,
    subjects: Subjects,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    engine: SimEngine | None = None,
    **options: Any,
) -> AsyncIterator[Worker]:
    engine = engine or SimEngine()
    monkeypatch.setattr(workers_main, "create", lambda _: engine)
    monkeypatch.setattr(workers_main, "_quiet_gc", lambda: None)
    connect = ConnectOptions(servers=(url,), name="worker")
    task = asyncio.create_task(workers_main.run_worker(settings(**options), connect, subjects))
    members = connection.bucket(subjects.bucket("members"))
    try:
        async with asyncio.timeout(30):
            while not task.done() and not await members.entries("worker.>"):
                await asyncio.sleep(0.02)
        if task.done():
            task.result()
        yield Worker(connection, subjects, engine)
    finally:
        task.cancel()
        await asyncio.wait([task])


def prompts(n: int) -> list[list[int]]:
    """Prompts that share beginnings, so many that blocks are evicted."""
    return [[k % 3] * 16 + [k] * (k % 13) + [k % 5] * 9 for k in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"faults": {"kv_drop_every": 4}},
        {"faults": {"kv_reorder_every": 3}},
        {"faults": {"kv_drop_every": 5, "kv_reorder_every": 2}, "kv_replay_batches": 3},
    ],
    ids=["sound", "dropped", "reordered", "little_replay"],
)
async def test_the_stream_tells_exactly_what_the_engine_has(
    connection: Connection,
    subjects: Subjects,
    nats_server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    args: dict[str, Any],
) -> None:
    async with working(connection, subjects, nats_server.url, monkeypatch, args=args) as worker:
        first = await worker.until_exact()
        assert first.of("device")  # the blocks of the warm-up
        for n, prompt in enumerate(prompts(60)):
            await worker.compute(prompt)
            if n % 7 == 0:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            for n in range(100, 200):  # the last batch may have been lost, and that shows with the next one
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.5):
                        reader = await worker.until_exact()
                        break
                await worker.compute([n] * 9)
        assert (reader.gaps, reader.resets) == (0, 0)
        assert reader.of("host")
        await worker.engine.control("reset_prefix_cache", {})
        await worker.compute([1, 2, 3, 4, 5])
        if "faults" not in args:
            await worker.until_exact()


@pytest.mark.slow
async def test_dumps_are_made_on_request_but_not_for_everybody_anew(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(connection, subjects, nats_server.url, monkeypatch) as worker:
        await worker.compute(*prompts(8))
        await worker.until_exact()
        assert decode(Done, await worker.ask(KvDump())).ok
        await worker.until(lambda reader: reader.resets >= 1)
        answers = [decode(Done, await worker.ask(KvDump())) for _ in range(10)]
        assert all(answer.ok for answer in answers)
        await worker.until(lambda reader: reader.resets >= 2)
        await asyncio.sleep(1.2)
        reader = await worker.until_exact()
        assert (reader.resets, reader.gaps) == (2, 0)
        assert decode(Inspection, await worker.ask(Inspect())).kv == "ok"


@pytest.mark.slow
async def test_a_server_that_was_gone_has_missed_nothing_in_the_end(
    own_server: EmbeddedServer, connect: Connect, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await connect(own_server, topology=Topology(subjects))
    async with working(connection, subjects, own_server.url, monkeypatch) as worker:
        await worker.compute(*prompts(5))
        before = await worker.until_exact()
        own_server.kill()
        for prompt in prompts(30):
            await worker.compute(prompt)
        await own_server.start_async()
        async with asyncio.timeout(20):
            while not connection.connected:
                await asyncio.sleep(0.02)
        after = await worker.until_exact()
        assert (after.epoch, after.gaps) == (before.epoch, 0)
        assert after.next > before.next


async def test_a_worker_says_what_it_is(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"step_tokens": 512}
    async with working(connection, subjects, nats_server.url, monkeypatch, labels=("zone=a", "big"), args=args) as worker:
        member = await worker.member()
        assert member.labels == ["zone=a", "big"]
        assert (member.kv_events, member.step_tokens, member.block_size) == (True, 512, SIZE)


class Mute(SimEngine):
    """An engine that cannot tell what it caches."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, kv_events=False)


async def test_a_worker_without_cache_events_says_so(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with working(connection, subjects, nats_server.url, monkeypatch, engine=Mute()) as worker:
            assert not (await worker.member()).kv_events
            await worker.compute(*prompts(3))
            answer = decode(Done, await worker.ask(KvDump()))
            assert not answer.ok
            assert "publishes no cache events" in answer.message
            assert (await worker.reader()).epoch is None
    assert "worker.no_kv_events" in [line["event"] for line in logs]


async def test_a_worker_with_another_block_size_is_refused_by_both_numbers(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(connection, subjects, nats_server.url, monkeypatch) as worker:
        known = await worker.member()
        monkeypatch.setattr(workers_main, "create", lambda _: SimEngine())
        options = ConnectOptions(servers=(nats_server.url,), name="other")
        with pytest.raises(RegistrationRefused, match=rf"{POOL} has block size {SIZE}, this worker's engine has 8: start"):
            await workers_main.run_worker(settings(args={"block_size": 8}), options, subjects)
        assert await worker.member() == known  # alone as before


async def test_reports_and_events_tell_what_a_request_costs(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(connection, subjects, nats_server.url, monkeypatch):
        events: list[JobEvent] = []
        reports: list[LoadReport] = []
        await connection.subscribe(subjects.events(POOL), lambda m: events.extend(decode(JobEvents, m.data).events))
        await connection.subscribe(subjects.load_filter(POOL), lambda m: reports.append(decode(LoadReport, m.data)))
        ingress = Ingress(connection, subjects)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(ingress.run())
            await ingress.wait_started(10)
            async with asyncio.timeout(10):
                while not ingress.models.ready_names():
                    await asyncio.sleep(0.01)
            card = ingress.models.get("m").card
            prompt = [7] * 41
            ids = []
            for _ in range(2):
                generation = Generation(token_ids=pack_u32(prompt), sampling=Sampling(max_tokens=30))
                hashes = pack_u64(block_chain(prompt, SIZE))
                job = Job(id=new_id(), card=card, generation=generation, prompt_tokens=41, max_tokens=30, hashes=hashes)
                stream = await ingress.submit(job)
                async with asyncio.timeout(10):
                    while not stream.finished:
                        await stream.rows()
                ids.append(job.id)
            async with asyncio.timeout(10):
                while sum(event.kind == "settled" for event in events) < 2:
                    await asyncio.sleep(0.01)
            running.cancel()
        told = [(event.kind, event.id, event.tokens, event.uncached) for event in events if event.kind == "prefilled"]
        assert told == [("prefilled", ids[0], 41, 41), ("prefilled", ids[1], 41, 1)]
        kinds = sorted(event.kind for event in events if event.id == ids[0])  # `placed` waits for an ack and may come late
        assert kinds == ["placed", "prefilled", "settled", "started"]
        assert {event.tokens for event in events if event.kind == "settled"} == {30}
        async with asyncio.timeout(5):
            while not any(report.step_decodes and report.step_s >= 0 for report in reports):
                await asyncio.sleep(0.01)
        assert [report.n for report in reports] == [*range(reports[0].n, reports[0].n + len(reports))]
        assert reports[-1].blocks_total == 64
