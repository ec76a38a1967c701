"""Carriers, workers, routers, clients that publish, cancel and read, all simulated, and what must hold of stored jobs.

Carriers, ingresses and worker sessions are the real ones.  This module looks at them from outside of time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.broker.codec import decode
from headrace.broker.durable.carrier import Carrier
from headrace.broker.durable.errors import StreamIncomplete
from headrace.broker.durable.names import job_of_run
from headrace.broker.durable.results import decode_result
from headrace.broker.durable.stored_jobs import JobCanceller, JobReader
from headrace.broker.durable.stream_writer import JobState, fold
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.messages.durable import (
    HEADER_BATCH,
    HEADER_CLASS,
    HEADER_DEADLINE,
    HEADER_JOB,
    HEADER_STREAM,
    JobResult,
    StreamEntry,
)
from headrace.broker.messages.members import WorkerMember
from headrace.broker.protocol.run import Run
from headrace.broker.settings import CarrierSettings, IngressSettings, SessionSettings, Timing
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.simulation.durable.jobs import SLUG, TENANT, Asked, JobWish, SimBatches, SimRenderer, check_tokens
from tests.simulation.protocol.deployment import describe
from tests.simulation.protocol.engine import SimEngine
from tests.simulation.protocol.requests import POOL, RunNote, Wish
from tests.simulation.protocol.router import random_scheduler, run_router
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.world import Violation, World

SUBJECTS = Subjects("hr")
TIMING = Timing(lease_ttl_s=3.0, load_period_s=5.0, load_gap_s=0.5)
RUNS_ON_S = 25.0  # a run may go on for so long after its job has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableShape:
    """A deployment with these jobs."""

    jobs: tuple[JobWish, ...]
    carriers: int = 2
    workers: int = 2
    routers: int = 0  # none: workers place on themselves
    shed: float = 0.0  # the part of requests that routers refuse
    slots: int = 3
    closing: tuple[tuple[str, float, str], ...] = ()  # batch, from when on it is closed, and how
    poison_limit: int = 8  # crashes by one poison job
    response_bytes: int = 500_000  # larger responses go to the object store
    unread: bool = False  # no client reads the streams
    still_until_s: float = 0.0  # the engines make nothing until then


@dataclass(eq=False)
class DurableDeployment:
    """Implements `search.Checks`."""

    world: World
    shape: DurableShape
    asked: dict[str, Asked] = field(default_factory=dict)
    runs: dict[int, RunNote] = field(default_factory=dict)
    sessions: dict[str, tuple[Machine, WorkerSession, SimEngine]] = field(default_factory=dict)
    carriers: dict[str, tuple[Machine, Carrier, Ingress]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    blown: dict[str, int] = field(default_factory=dict)
    busy: int = 0  # publishers, cancellers and readers that are not done

    def build(self) -> DurableDeployment:
        world, shape = self.world, self.shape
        world.server.install(Topology(subjects=SUBJECTS))
        world.describe = describe
        for number, wish in enumerate(shape.jobs):
            asked = Asked(f"j{number}", wish)
            self.asked[asked.name] = asked
        for i in range(shape.routers):
            world.process(f"R{i}", self.route, restart=True)
        for i in range(shape.workers):
            world.process(f"W{i}", self.work, restart=True, restart_on_exit=True)
        for i in range(shape.carriers):
            world.process(f"J{i}", self.carry, restart=True, restart_on_exit=True)
        world.process("K", self.publish)
        self._guard_acks()
        world.fault_kinds["drain"] = self._drain
        for kind in ("crash", "powercut"):
            world.fault_kinds[kind] = self._sparing_clients(world.fault_kinds[kind])
        return self

    # -- processes ----------------------------------------------------------------------------------------------

    async def route(self, machine: Machine) -> None:
        scheduler = random_scheduler(machine, self.shape.shed)
        await run_router(machine, SUBJECTS, POOL, scheduler, timing=TIMING, on_decided=lambda: None)

    async def work(self, machine: Machine) -> None:
        engine = SimEngine(machine, self._begin)
        engine.on_poison = self._blow_worker
        engine.still_until_s = self.shape.still_until_s
        deps = WorkerDeps(
            messaging=machine.messaging,
            subjects=SUBJECTS,
            settings=SessionSettings(timing=TIMING, slots=self.shape.slots),
            wall=machine.wall,
            random_bits=machine.rng.getrandbits,
        )
        member = WorkerMember(worker=machine.id, pool=POOL, model="m", slots=self.shape.slots)
        session = WorkerSession(deps, member, EnginePorts(executor=engine))
        engine.session = session
        self.sessions[machine.id] = (machine, session, engine)
        async with asyncio.TaskGroup() as tasks:
            stepping = tasks.create_task(engine.run())
            try:
                await session.run()
            except JetStreamError as error:
                machine.note("not started", repr(error))
            stepping.cancel()

    async def carry(self, machine: Machine) -> None:
        ingress = Ingress(
            machine.messaging,
            SUBJECTS,
            ingress_id=machine.id,
            settings=IngressSettings(timing=TIMING, no_worker_wait_s=3.0),
            wall=machine.wall,
        )
        carrier = Carrier(
            machine.messaging,
            SUBJECTS,
            ingress,
            SimRenderer(machine, self.asked, self._blow_carrier),
            batches=SimBatches(machine, self.shape.closing),
            settings=CarrierSettings(
                timing=TIMING,
                poll_s=3.0,
                entry_rows=4,
                sweep_s=5.0,
                margin_s=3.0,
                unknown_model_s=4.0,
                response_bytes=self.shape.response_bytes,
            ),
            wall=machine.wall,
        )
        self.carriers[machine.id] = (machine, carrier, ingress)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ingress.run())
            tasks.create_task(carrier.run())

    async def publish(self, machine: Machine) -> None:
        """Everything that clients do."""
        async with asyncio.TaskGroup() as tasks:
            for asked in self.asked.values():
                tasks.create_task(self._client(machine, asked))
        await asyncio.sleep(1e6)

    async def _client(self, machine: Machine, asked: Asked) -> None:
        wish = asked.wish
        self.busy += 1
        await asyncio.sleep(wish.at_s)
        asked.published_s = self.world.now
        await self._store(machine, asked)
        asked.stored = True
        async with asyncio.TaskGroup() as tasks:
            if wish.twice_s is not None:
                tasks.create_task(self._store_again(machine, asked, wish.twice_s))
            if wish.cancel_s is not None:
                tasks.create_task(self._cancel(machine, asked, wish.cancel_s))
            if wish.durable and not self.shape.unread:
                tasks.create_task(self._read(machine, asked))
        self.busy -= 1

    async def _store(self, machine: Machine, asked: Asked) -> None:
        wish = asked.wish
        headers = {
            HEADER_JOB: asked.name,
            HEADER_CLASS: wish.request_class,
            HEADER_DEADLINE: str(machine.wall() - self.world.now + asked.published_s + wish.deadline_s),
        }
        if wish.durable:
            headers[HEADER_STREAM] = "1"
        if wish.batch:
            headers[HEADER_BATCH] = wish.batch
        while True:
            try:
                await machine.messaging.publish(
                    SUBJECTS.job(wish.slug, TENANT), asked.body(), headers=headers, msg_id=f"{TENANT}.{asked.name}"
                )
            except JetStreamError:
                await asyncio.sleep(0.2)
            else:
                return

    async def _store_again(self, machine: Machine, asked: Asked, delay_s: float) -> None:
        """A second copy, as after the window of deduplication."""
        await asyncio.sleep(delay_s)
        self.world.server.stream(SUBJECTS.stream("JOB")).ids.clear()
        await self._store(machine, asked)

    async def _cancel(self, machine: Machine, asked: Asked, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        canceller = JobCanceller(machine.messaging, SUBJECTS, wall=machine.wall)
        asked.told = await canceller.cancel(TENANT, asked.name)
        machine.note("TOLD", asked.name, asked.told)

    async def _read(self, machine: Machine, asked: Asked) -> None:
        reader = JobReader(machine.messaging, SUBJECTS)
        cut = machine.rng.randint(1, 9)
        while not asked.read_to_end:
            events = reader.events(TENANT, asked.token, first=len(asked.events))
            try:
                while not asked.read_to_end:
                    stretch = await events.next()
                    if stretch.first != len(asked.events):
                        raise Violation(f"reader of {asked.name} got event {stretch.first} after {len(asked.events)}")
                    if stretch.end is not None:
                        asked.events += stretch.events
                        asked.read_to_end = stretch.end.status or "?"
                    else:
                        asked.events += stretch.events[:cut]  # the client may go away in the middle of an entry
                        if len(stretch.events) > cut:
                            break
            except JetStreamError:
                await asyncio.sleep(0.5)
            finally:
                await events.close()

    # -- what happens -------------------------------------------------------------------------------------------

    def _begin(self, engine: SimEngine, run: Run, _payload: bytes) -> tuple[RunNote, Wish]:
        asked = next(asked for asked in self.asked.values() if asked.id == job_of_run(run.id))
        part = int(run.id.rpartition("-")[2]) if "-" in run.id else 0
        prefix = tuple(tuple(log.ids) for log in run.choices)
        note = self.runs[len(self.runs) + 1] = RunNote(len(self.runs) + 1, run.id, run.attempt, run.run, engine.machine, prefix)
        engine.machine.note("RUNS", asked.name, run.id, run.attempt, "from", [len(p) for p in prefix])
        return note, asked.wish.part(part)

    def _blow_worker(self, run: str) -> None:
        self._blow(next(asked.name for asked in self.asked.values() if asked.id == job_of_run(run)))

    def _blow_carrier(self, name: str) -> None:
        self._blow(name)

    def _blow(self, name: str) -> None:
        self.blown[name] = self.blown.get(name, 0) + 1
        if self.blown[name] > self.shape.poison_limit:
            raise Violation(f"poison goes on: {name} crashed {self.blown[name]} processes")

    def _sparing_clients(self, strike: Callable[..., object]) -> Callable[[Machine, float | None], None]:
        """The clients are what checks the rest: they may be frozen and cut off, but do not die."""

        def spared(machine: Machine, length_s: float | None) -> None:
            if machine.name != "K":
                strike(machine, length_s)

        return spared

    def _drain(self, machine: Machine, _length_s: float | None) -> None:
        if machine.id in self.carriers and machine.id not in self.left:
            self.left.add(machine.id)
            machine.loop.create_task(self._leave(machine))

    async def _leave(self, machine: Machine) -> None:
        _, carrier, ingress = self.carriers[machine.id]
        await carrier.drain(self.world.rng.choice((0.0, 1.0, 5.0)))
        await ingress.drain(0.5)
        await asyncio.sleep(0.2)  # what was sent has left
        machine.crash()

    def _guard_acks(self) -> None:
        """A stored job may leave its queue only when its result is stored."""
        stream = self.world.server.stream(SUBJECTS.stream("JOB"))
        remove = stream.remove

        def guarded(seq: int) -> bool:
            message = stream.messages.get(seq)
            if message is not None and not self.results(self.asked[(message.headers or {})[HEADER_JOB]]):
                self.world.violation(f"acked early: job {(message.headers or {})[HEADER_JOB]} has no result")
            return remove(seq)

        stream.remove = guarded  # type: ignore[method-assign]

    # -- what is stored -----------------------------------------------------------------------------------------

    def results(self, asked: Asked) -> list[JobResult]:
        stored = self.world.server.stream(SUBJECTS.stream("RESULT")).of_subject(SUBJECTS.result(TENANT, asked.token), 9)
        return [decode_result(message.data) for message in stored]

    def state(self, asked: Asked) -> JobState:
        stored = self.world.server.stream(SUBJECTS.stream("RSP")).of_subject(SUBJECTS.rsp(TENANT, asked.token), 10_000)
        try:
            return fold((message.seq, decode(StreamEntry, message.data)) for message in stored)
        except StreamIncomplete as error:
            raise Violation(f"broken stream: that of {asked.name}: {error}") from error

    # -- search.Checks ------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        found = [f"clients: {self.busy}"] * (self.busy > 0)
        found += [f"no result of {asked.name}" for asked in self.asked.values() if not self.results(asked)]
        for kind in ("JOB", "REQ", "MOVED", "WORK"):
            stored = self.world.server.streams[SUBJECTS.stream(kind)].messages.values()
            found += [f"{kind} {m.subject} {describe(m.subject, m.data, m.headers)}" for m in stored]
        for machine, session, engine in self.sessions.values():
            if machine.alive:
                found += [f"run {run.ref} {run.state.value} on {machine.id}" for run in session.runs.table]
                found += [f"engine of {machine.id} runs {run.ref}" for run in engine.running]
        for machine, carrier, ingress in self.carriers.values():
            if machine.alive:
                found += [f"held at {machine.id}: {carrier.jobs}"] * (carrier.jobs > 0)
                found += [f"open at {machine.id}: {ingress.open_requests}"] * (ingress.open_requests > 0)
        if not self.carriers or not all(asked.stored for asked in self.asked.values()):
            found.append("nothing has started")
        return found

    def verify(self) -> None:
        for asked in self.asked.values():
            results = self.results(asked)
            if len(results) != 1:
                raise Violation(f"results of {asked.name}: {len(results)}")
            self._check_result(asked, results[0])
            if asked.wish.durable:
                self._check_stream(asked, results[0])

    def _check_result(self, asked: Asked, result: JobResult) -> None:
        wish, status = asked.wish, result.status
        if asked.told and asked.told != status:
            raise Violation(f"told wrong: the canceller of {asked.name} was told {asked.told}, its result is {status}")
        closed = {batch: how for batch, _, how in self.shape.closing}
        allowed: dict[str, Any] = {
            "done": not wish.poison and not wish.malformed,
            "cancelled": wish.cancel_s is not None or closed.get(wish.batch) == "cancelled",
            "expired": self.world.now >= asked.published_s + wish.deadline_s or closed.get(wish.batch) == "expired",
            "poison": bool(wish.poison) or self._died_preparing(asked) >= 3,
            "malformed": wish.malformed,
            "failed": wish.slug != SLUG,
        }
        if not allowed.get(status, False):
            raise Violation(f"wrong end: {asked.name} {status} {result.error}")
        if status == "done":
            response = result.response
            if response is None:
                assert result.object is not None
                data = self.world.server.objects[SUBJECTS.bucket("results")].get(result.object.name)
                if data is None:
                    raise Violation(f"lost object: that of {asked.name}")
                body = json.loads(data.data)["body"]
            else:
                body = msgspec.json.decode(response.body)
            check_tokens(asked, body["tokens"], self.runs, whole=True)

    def _died_preparing(self, asked: Asked) -> int:
        """The number of carriers that died after they took this job and before they submitted it."""
        return sum(
            held.rendered is None
            for machine, carrier, _ in self.carriers.values()
            for held in carrier._held.of(asked.id)
            if not machine.alive
        )

    def _check_stream(self, asked: Asked, result: JobResult) -> None:
        state = self.state(asked)
        if state.end is None or state.end.status != result.status:
            raise Violation(f"two ends: {asked.name} {state.end and state.end.status} in the stream, result {result.status}")
        tokens = state.emitted_of(len(asked.wish.lengths))
        check_tokens(asked, tokens, self.runs, whole=result.status == "done")
        stored = [event for entry in state.entries for event in entry.events]
        if not self.shape.unread and (asked.events != stored or asked.read_to_end != state.end.status):
            raise Violation(f"wrong events: the reader of {asked.name} got {len(asked.events)} of {len(stored)}")
