"""Ingresses with clients, workers with scripted engines and routers, all simulated, and what must hold of them.

The sessions are the real ones of `broker/`.  This module looks at them from outside of time: it sees every process, dead ones
too, and compares what they believe with what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.broker.codec import decode
from headrace.broker.errors import AdmissionError, JobError
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.messages.control import Claim, ClaimReply
from headrace.broker.messages.durable import DeadLetter
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import HEADER_HISTORY, Generation
from headrace.broker.protocol.quarantine import POISON_WEIGHT
from headrace.broker.protocol.resume import GENERATION
from headrace.broker.protocol.run import Run
from headrace.broker.settings import IngressSettings, SessionSettings
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.topology import Topology
from tests.simulation.protocol.crash_truth import CrashTruth
from tests.simulation.protocol.engine import SimEngine
from tests.simulation.protocol.requests import POOL, Request, RunNote, Wish
from tests.simulation.protocol.router import run_router
from tests.simulation.protocol.shape import SLOW_CLIENT_S, SPILL_BYTES, SUBJECTS, TIMING, Shape, Worker
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.world import Violation, World

LOOK_S = 0.1
GIVE_UP_S = 30.0  # a client that finds no room for so long goes away


@dataclass(eq=False)
class Deployment:
    """Implements `search.Checks`."""

    world: World
    shape: Shape
    requests: dict[str, Request] = field(default_factory=dict)
    runs: dict[int, RunNote] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    ingresses: dict[str, Ingress] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # processes that went by themselves
    waiting: dict[str, int] = field(default_factory=dict)  # clients that have not submitted yet, by ingress
    blown: dict[str, int] = field(default_factory=dict)  # crashes by a poison request
    beside: dict[str, int] = field(default_factory=dict)  # starts of a suspect beside jobs that could not be moved away
    claimed: dict[str, set[str]] = field(default_factory=dict)  # by which workers
    promised: dict[tuple[str, int], Claim] = field(default_factory=dict)  # by request and run
    attempts: dict[str, int] = field(default_factory=dict)  # the highest that started, inside a generation
    closing: dict[str, asyncio.Event] = field(default_factory=dict)  # set once an ingress has drained
    drained: set[str] = field(default_factory=set)  # ingresses told to drain

    def __post_init__(self) -> None:
        self.truth = CrashTruth(self.world, self.workers, self.runs, self.claimed, self.left)

    def build(self) -> Deployment:
        world, shape = self.world, self.shape
        world.server.install(Topology(subjects=SUBJECTS))
        world.describe = describe
        for i in range(shape.routers):
            world.process(f"R{i}", self.route, restart=True)
        for i in range(shape.workers):
            world.process(f"W{i}", self.work, restart=True, restart_on_exit=True)
        for i in range(shape.ingresses):
            world.process(f"J{i}", self.serve, restart=True, restart_on_exit=True)
        world.at(0.0, self._look)
        world.fault_kinds |= {
            "drain": self._on_worker(lambda worker: worker.session.service.begin_drain(self.world.rng.choice((0.0, 0.5, 3.0)))),
            "engine": self._on_worker(lambda worker: worker.machine.loop.create_task(worker.engine.die())),
            "flaky": self._on_worker(lambda worker: setattr(worker.engine, "flaky", 3)),
            "redeliver": self._redeliver,
            "cancel": self._cancel_one,
            "close": self._close_ingress,
        }
        return self

    # -- processes ----------------------------------------------------------------------------------------------

    async def route(self, machine: Machine) -> None:
        def on_decided() -> None:
            members = self.world.server.buckets[SUBJECTS.bucket("members")]
            if not members.leased(SUBJECTS.router_key(POOL, machine.id)):
                self.world.violation(f"decided without a lease: {machine.id}")

        scheduler = self.shape.scheduler(machine, self.shape.shed)
        await run_router(machine, SUBJECTS, POOL, scheduler, timing=TIMING, on_decided=on_decided)

    async def work(self, machine: Machine) -> None:
        engine = SimEngine(machine, self._begin)
        engine.on_poison = self._blow
        deps = WorkerDeps(
            messaging=machine.messaging,
            subjects=SUBJECTS,
            settings=SessionSettings(timing=TIMING, slots=self.shape.slots, parked_tokens=self.shape.parked_tokens),
            wall=machine.wall,
            random_bits=machine.rng.getrandbits,
        )
        fleets = self.shape.fleets
        number = int(machine.name[1:]) % len(fleets)
        member = WorkerMember(
            worker=machine.id,
            pool=POOL,
            model="m",
            slots=self.shape.slots,
            start_s=self.shape.start_s,
            fleet=fleets[number],
            price=float(number),
        )
        session = WorkerSession(deps, member, EnginePorts(executor=engine))
        engine.session = session
        self.workers[machine.id] = Worker(machine, session, engine)
        try:
            async with asyncio.TaskGroup() as tasks:
                stepping = tasks.create_task(engine.run())
                try:
                    await session.run()
                except JetStreamError as error:  # it could not even register: started again
                    machine.note("not started", repr(error))
                stepping.cancel()
        finally:
            if machine.alive:
                self.left.add(machine.id)
        if len(session.runs.table):
            raise Violation(f"abandoned by {machine.id}: {[run.ref for run in session.runs.table]}")

    async def serve(self, machine: Machine) -> None:
        ingress = Ingress(
            machine.messaging,
            SUBJECTS,
            ingress_id=machine.id,
            settings=IngressSettings(
                timing=TIMING,
                no_worker_wait_s=self.shape.no_worker_wait_s,
                max_rows=self.shape.max_rows,
                slow_client_s=SLOW_CLIENT_S,
                spill_bytes=SPILL_BYTES,
            ),
            wall=machine.wall,
        )
        self.ingresses[machine.id] = ingress
        ingress._judge.on_claim = self._checked(ingress._judge.on_claim)  # type: ignore[method-assign]
        wishes = self.shape.wishes(machine)
        self.waiting[machine.id] = len(wishes)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(ingress.run())]
                running += [tasks.create_task(self._client(machine, ingress, wish)) for wish in wishes]
                closed = self.closing.setdefault(machine.id, asyncio.Event())
                await closed.wait()
                for task in running:
                    task.cancel()
        finally:
            if machine.alive:
                self.left.add(machine.id)

    # -- clients ------------------------------------------------------------------------------------------------

    async def _client(self, machine: Machine, ingress: Ingress, wish: Wish) -> None:
        await asyncio.sleep(wish.at_s)
        until = self.world.now + GIVE_UP_S
        request = None
        while request is None and self.world.now < until:
            request = await self._submit(machine, ingress, wish)
            if request is None:
                await asyncio.sleep(0.3)
        self.waiting[machine.id] -= 1
        if request is None or request.stream is None:
            return
        async with asyncio.TaskGroup() as tasks:
            if wish.cancel_s is not None:
                tasks.create_task(self._cancel_later(request, wish.cancel_s))
            request.outcome = await self._read(request)
            machine.note("END", request.id, request.outcome)
            self._check_outcome(request)

    async def _submit(self, machine: Machine, ingress: Ingress, wish: Wish) -> Request | None:
        request = Request(f"q{len(self.requests)}", wish, machine, self.runs)
        self.requests[request.id] = request
        request.accepted_s = self.world.now
        try:
            request.stream = await ingress.submit(request.job())
        except AdmissionError as error:
            machine.note("refused", request.id, repr(error))
            request.outcome = "refused"
            return None
        return request

    async def _cancel_later(self, request: Request, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._cancel(request)

    def _cancel(self, request: Request) -> None:
        if request.open and request.stream is not None:
            request.cancelled = True
            request.stream.cancel()

    async def _read(self, request: Request) -> str:
        stream = request.stream
        assert stream is not None
        last_s = self.world.now
        try:
            while not stream.finished:
                for row in await stream.rows():
                    request.take(row)
                paused_s, promised_s = self.world.now - last_s, request.wish.pauses_within_s
                if 0 < promised_s < paused_s:
                    raise Violation(f"paused: {request.id} for {paused_s:.2f} s")
                last_s = self.world.now
                if request.wish.pause_s:
                    await asyncio.sleep(request.wish.pause_s)
        except JobError as error:
            return error.code
        request.check_answer()
        return "answered"

    def _check_outcome(self, request: Request) -> None:
        code, wish = request.outcome, request.wish
        if code == "poison":
            real = self.truth.real_crashes(request.id) | self.truth.away(request.id)
            live = self.shape.innocents_live and not wish.poison and not 0 < self.shape.unlucky <= len(real)
            if len(real) < POISON_WEIGHT or live:
                raise Violation(f"innocent dead-lettered: {request.id} after {sorted(real)}")
            return
        allowed = {
            "answered": not wish.poison and not wish.invalid,
            "cancelled": request.cancelled or request.judge.id in self.drained,
            "deadline_exceeded": self.world.now >= request.accepted_s + wish.deadline_s,
            "refused": (self.shape.shed > 0 and not (self.shape.refused_unstarted and any(request.tokens)))
            or self._had_no_worker(request),
            "invalid_request": wish.invalid,
            "slow_client": wish.pause_s > 0,
            "engine_error": self.attempts.get(request.id, 0) >= SessionSettings().max_attempts,
        }
        if not allowed.get(code, False):
            raise Violation(f"wrong end: {request.id} {code}")

    def _had_no_worker(self, request: Request) -> bool:
        """Return whether the request may have ended because no worker came in time."""
        wait_s = min(self.shape.no_worker_wait_s, request.wish.deadline_s)
        return wait_s > 0 and not any(request.tokens) and self.world.now >= request.accepted_s + wait_s

    # -- faults of our own --------------------------------------------------------------------------------------

    def _on_worker(self, action: Callable[[Worker], object]) -> Callable[[Machine, float | None], None]:
        def strike(machine: Machine, _length_s: float | None) -> None:
            if machine.id in self.workers:
                worker = self.workers[machine.id]
                if not worker.session.presence.draining and not worker.engine.dead:
                    machine.loop.call_soon(action, worker)

        return strike

    def _redeliver(self, machine: Machine, _length_s: float | None) -> None:
        """The server believes that what this worker holds was held for too long."""
        consumer = self.world.server.consumer(SUBJECTS.stream("WORK"), SUBJECTS.work_consumer(machine.id))
        if consumer is not None:
            for seq in list(consumer.pending):
                consumer.nak(seq, 0.0)

    def _cancel_one(self, machine: Machine, _length_s: float | None) -> None:
        mine = [request for request in self.requests.values() if request.judge is machine and request.open]
        if mine:
            machine.loop.call_soon(self._cancel, self.world.rng.choice(mine))

    def _close_ingress(self, machine: Machine, _length_s: float | None) -> None:
        if machine.id in self.closing and machine.id not in self.drained:
            self.drained.add(machine.id)
            machine.loop.create_task(self._close(machine))

    async def _close(self, machine: Machine) -> None:
        await self.ingresses[machine.id].drain(1.0)
        await asyncio.sleep(0.5)  # clients read what is left
        self.closing[machine.id].set()

    # -- what happened ------------------------------------------------------------------------------------------

    def _begin(self, engine: SimEngine, run: Run, payload: bytes) -> tuple[RunNote, Wish]:
        request = self.requests[run.id]
        if decode(Generation, payload).token_ids != request.wish.payload:
            raise Violation(f"wrong payload of {run.id}")
        if engine.dead:
            raise Violation(f"started on a dead engine: {run.ref} on {engine.machine.id}")
        if run in engine.running:
            raise Violation(f"started twice: {run.ref} on {engine.machine.id}")
        self._check_group(engine, run)
        self._check_wait(request)
        self.attempts[run.id] = max(run.attempt % GENERATION, self.attempts.get(run.id, 0))
        prefix = tuple(tuple(log.ids) for log in run.choices)
        note = self.runs[len(self.runs) + 1] = RunNote(len(self.runs) + 1, run.id, run.attempt, run.run, engine.machine, prefix)
        engine.machine.note("RUNS", run.id, run.attempt, "from", [len(p) for p in prefix], "crashes", run.crashes)
        return note, request.wish

    def _check_wait(self, request: Request) -> None:
        waited_s, promised_s = self.world.now - request.accepted_s, request.wish.starts_within_s
        if request.id not in self.attempts and 0 < promised_s < waited_s:
            raise Violation(f"started late: {request.id} after {waited_s:.2f} s")

    def _check_group(self, engine: SimEngine, run: Run) -> None:
        """No more suspects run together than was promised to the judge of any of them.

        Nothing else starts beside them, but for a run that was being claimed when one of them lost patience: its judge knows.
        """
        suspects = [work.run for work in engine.running.values() if work.run.suspect]
        if not run.suspect and not all(self.promised[one.id, one.run].beside for one in suspects):
            raise Violation(f"beside suspects: {run.ref} on {engine.machine.id} beside {[other.ref for other in suspects]}")
        if run.suspect:
            suspects.append(run)
            most = min(self.promised[one.id, one.run].group for one in suspects)
            if len(suspects) > most:
                raise Violation(f"group too large: {len(suspects)} on {engine.machine.id}, promised {most}")

    def _checked(self, on_claim: Callable[..., ClaimReply]) -> Callable[..., ClaimReply]:
        """The judge's `on_claim`, compared with what really happened."""

        def checked(claim: Claim, now_s: float, **options: Any) -> ClaimReply:
            reply = on_claim(claim, now_s, **options)
            crashed = self.truth.real_crashes(claim.id) | self.truth.away(claim.id)
            if reply.crashes > len(crashed):
                self.world.violation(f"overcounted crashes of {claim.id}: {reply.crashes}, really {sorted(crashed)}")
            self.claimed.setdefault(claim.id, set()).add(claim.worker)
            self.promised[claim.id, claim.run] = claim
            if claim.beside and reply.verdict == "go":
                self.beside[claim.id] = self.beside.get(claim.id, 0) + 1
            return reply

        return checked

    def _blow(self, request_id: str) -> None:
        self.blown[request_id] = self.blown.get(request_id, 0) + 1
        record = self.ingresses[self.requests[request_id].judge.id]._judge.get(request_id)
        hidden = record.generation if record is not None else 0  # a run that a new generation supersedes counts as alive
        if not self.world.config.dedupe:  # each copy of a first attempt starts without a question
            hidden += sum(note.request_id == request_id and note.attempt == 1 for note in self.runs.values()) - 1
        hidden += self.beside.get(request_id, 0)  # proves nothing
        if self.blown[request_id] > self.shape.poison_limit + hidden:
            raise Violation(f"poison goes on: {request_id} crashed {self.blown[request_id]} workers")
        if sum(self.blown.values()) > self.shape.all_poison_limit + sum(self.beside.get(one, 0) for one in self.blown):
            raise Violation(f"poison goes on: {self.blown}")

    def _look(self) -> None:
        for name, worker in self.workers.items():
            if worker.machine.alive and self.truth.leaseless(name):
                self.truth.absent[name] = self.world.now
        if self.shape.unsuspected:
            for message in self.world.server.streams[SUBJECTS.stream("MOVED")].messages.values():
                if message.headers and HEADER_HISTORY in message.headers:
                    self.world.violation(f"suspected: {describe(message.subject, message.data, message.headers)}")
        self.world.at(LOOK_S, self._look)

    # -- search.Checks ------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        found = []
        for kind in ("REQ", "MOVED", "WORK"):
            stored = self.world.server.streams[SUBJECTS.stream(kind)].messages.values()
            found += [f"{kind} {m.subject} {describe(m.subject, m.data, m.headers)}" for m in stored]
        for worker in self.workers.values():
            if worker.machine.alive:
                found += [f"run {run.ref} {run.state.value} on {worker.machine.id}" for run in worker.session.runs.table]
                found += [f"engine of {worker.machine.id} runs {run.ref}" for run in worker.engine.running]
        for name, ingress in self.ingresses.items():
            machine = next(m for m in self.world.machines if m.id == name)
            if machine.alive and machine.id not in self.left:
                found += [f"open at {name}: {ingress.open_requests}"] * (ingress.open_requests > 0)
                found += [f"waiting at {name}: {self.waiting[name]}"] * (self.waiting[name] > 0)
        found += [f"open {r.id}" for r in self.requests.values() if r.open and r.judge.alive]
        letters = self.world.server.streams[SUBJECTS.stream("DLQ")].messages.values()
        dead = {decode(DeadLetter, m.data).envelope.id for m in letters}
        poisoned = [r for r in self.requests.values() if r.outcome == "poison" and r.judge.alive]
        found += [f"no dead letter of {r.id}" for r in poisoned if r.id not in dead]
        if not self.ingresses:
            found.append("nothing has started")
        return found

    def verify(self) -> None:
        """Everything is checked as it happens."""


def describe(subject: str, data: bytes, headers: Mapping[str, str] | None) -> str:
    """A message in a story."""
    with contextlib.suppress(msgspec.DecodeError):
        body = msgspec.msgpack.decode(data)
        if isinstance(body, dict):
            for noise in ("payload", "created", "deadline", "pool", "model", "tokens", "v"):
                body.pop(noise, None)
        return f"{body} {dict(headers) if headers else ''}"
    return f"{len(data)} bytes"
