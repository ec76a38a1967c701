"""Prefill and decode workers with the real runtime and sessions over scripted engines, an ingress and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.codec import pack_u32
from headrace.broker.errors import AdmissionError, JobError
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.ingress.stream import JobStream
from headrace.broker.jobs import Job
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Generation, Sampling
from headrace.broker.settings import IngressSettings, SessionSettings
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.topology import Topology
from headrace.workers.detokenize import TokenTable
from headrace.workers.engine import DisaggStyle
from headrace.workers.runtime.decode_side import HandoverDeps
from headrace.workers.runtime.handover import HandoverCoordinator
from headrace.workers.runtime.prefill_side import Clocks, PrefillSide, PrefixLender
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.settings import WorkerSettings
from headrace.workers.sim.tokens import BUNDLED_TOKENIZER
from tests.simulation.prefill.engine import LEASE_S, TRANSFER_S, Cluster, ScriptedEngine, token
from tests.simulation.protocol.requests import CARD, POOL
from tests.simulation.protocol.shape import SUBJECTS, TIMING
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.world import Violation, World

TABLE = TokenTable.load(str(BUNDLED_TOKENIZER))
GIVE_UP_S = 30.0
ROLES = ("aggregated", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A deployment of so many prefill and decode workers."""

    prefill: int = 2
    decode: int = 2
    requests: int = 5
    style: DisaggStyle = DisaggStyle.PARAMS
    lengths: tuple[int, ...] = (20, 200, 600)  # prompt tokens
    max_tokens: tuple[int, ...] = (1, 8, 30)
    budget: int = 800
    lease_s: float = LEASE_S
    transfer_s: float = TRANSFER_S
    first_s: float = 0.0  # no request comes before
    deaf: bool = False  # prefill workers take nothing


@dataclass(eq=False, slots=True)
class Ask:
    """One request of a client."""

    id: str
    prompt: list[int]
    max_tokens: int
    choices: int
    judge: Machine
    tokens: list[list[int]]
    outcome: str = ""
    cancelled: bool = False
    stream: JobStream | None = None
    at_s: list[float] = field(default_factory=list)  # when rows came


@dataclass(eq=False, slots=True)
class Worker:
    machine: Machine
    session: WorkerSession
    engine: ScriptedEngine


@dataclass(eq=False)
class Deployment:
    """Implements `search.Checks`."""

    world: World
    shape: Shape
    cluster: Cluster = field(default_factory=Cluster)
    workers: dict[str, Worker] = field(default_factory=dict)
    ingresses: dict[str, Ingress] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    waiting: dict[str, int] = field(default_factory=dict)
    ids: int = 0

    def build(self) -> Deployment:
        world = self.world
        self.cluster.transfer_s = self.shape.transfer_s
        world.server.install(Topology(subjects=SUBJECTS))
        for i in range(self.shape.prefill):
            world.process(f"P{i}", lambda machine: self.work(machine, "prefill"), restart=True, restart_on_exit=True)
        for i in range(self.shape.decode):
            world.process(f"W{i}", lambda machine: self.work(machine, "decode"), restart=True, restart_on_exit=True)
        world.process("J0", self.serve, restart=True, restart_on_exit=True)
        world.fault_kinds |= {
            "drain": self._on_worker(lambda w: w.session.service.begin_drain(self.world.rng.choice((0.0, 0.5, 3.0)))),
            "role": self._on_worker(self._change_role),
            "cancel": self._cancel_one,
            "break": self._set("breaks"),
            "stall": self._set("stalls"),
        }
        return self

    # -- processes ----------------------------------------------------------------------------------------------

    async def work(self, machine: Machine, role: str) -> None:
        engine = ScriptedEngine(machine, self.cluster, self.shape.style, lease_s=self.shape.lease_s)
        info = engine.info()
        runtime = Runtime(engine, stall_s=300.0)  # type: ignore[arg-type]
        engine.sink = runtime.on_step
        prefill_side = PrefillSide(
            engine,  # type: ignore[arg-type]
            info,
            runtime.raw,
            worker=machine.id,
            caches=(),
            clocks=Clocks(wall=machine.wall, monotonic=machine.loop.time),
        )
        member = WorkerMember(
            worker=machine.id,
            pool=POOL,
            model="m",
            slots=info.slots,
            role=role,
            roles=list(ROLES),
            handover=info.handover,
            started=machine.wall(),
        )
        deps = WorkerDeps(
            messaging=machine.messaging,
            subjects=SUBJECTS,
            settings=SessionSettings(timing=TIMING, slots=info.slots, prefill_budget_tokens=self.shape.budget),
            wall=machine.wall,
            random_bits=machine.rng.getrandbits,
        )
        session = WorkerSession(deps, member, EnginePorts(executor=runtime, prefill=prefill_side, set_role=runtime.set_role))
        assert session.prefill_server is not None
        if self.shape.deaf:
            session.prefill_server._may_take = lambda: False
        handover_deps = HandoverDeps(
            client=session.prefill_client,
            engines=runtime.sequences,
            info=info,
            style=self.shape.style,
            worker=machine.id,
            rng=machine.rng,
            wall=machine.wall,
        )
        coordinator = HandoverCoordinator(
            handover_deps,
            WorkerSettings(engine="sim", model="m", prefill_min_tokens=64, transfer_timeout_s=4.0),
            role=lambda: session.presence.member.role,
            lender=PrefixLender(runtime.raw, info),
        )
        runtime.attach(session.runs, info, TABLE, coordinator)
        self.workers[machine.id] = Worker(machine, session, engine)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine.tasks = tasks
                running = tasks.create_task(runtime.run())
                try:
                    await session.run()
                except JetStreamError as error:  # it could not even register: started again
                    machine.note("not started", repr(error))
                running.cancel()
                for task in list(engine.running.values()):
                    task.cancel()
        finally:
            if machine.alive:
                self.left.add(machine.id)

    async def serve(self, machine: Machine) -> None:
        ingress = Ingress(
            machine.messaging,
            SUBJECTS,
            ingress_id=machine.id,
            settings=IngressSettings(timing=TIMING, no_worker_wait_s=0.0),  # clients try again instead
            wall=machine.wall,
        )
        self.ingresses[machine.id] = ingress
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ingress.run())
            self.waiting[machine.id] = self.shape.requests
            for _ in range(self.shape.requests):
                tasks.create_task(self._client(machine, ingress))

    async def _client(self, machine: Machine, ingress: Ingress) -> None:
        rng = machine.rng
        await asyncio.sleep(rng.uniform(self.shape.first_s, 4.0))
        prompt = [rng.randrange(100, 30_000) for _ in range(rng.choice(self.shape.lengths))]
        choices = rng.choice((1, 1, 2))
        max_tokens = rng.choice(self.shape.max_tokens)
        until = self.world.now + GIVE_UP_S
        while self.world.now < until:
            self.ids += 1
            ask = Ask(f"q{self.ids}", prompt, max_tokens, choices, machine, [[] for _ in range(choices)])
            job = Job(
                id=ask.id,
                card=CARD,
                generation=Generation(token_ids=pack_u32(prompt), sampling=Sampling(max_tokens=max_tokens)),
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                choices=choices,
                deadline_s=400.0,
            )
            try:
                stream = await ingress.submit(job)
            except AdmissionError as error:
                machine.note("refused", repr(error))
                await asyncio.sleep(0.3)
                continue
            ask.stream = stream
            self.asks.append(ask)
            self.waiting[machine.id] -= 1
            try:
                while not stream.finished:
                    for row in await stream.rows():
                        ask.tokens[row.choice] += row.ids
                        ask.at_s.append(self.world.now)
            except JobError as error:
                ask.outcome = error.code
            else:
                ask.outcome = "answered"
            self._check(ask)
            return
        self.waiting[machine.id] -= 1

    def _check(self, ask: Ask) -> None:
        if ask.outcome == "answered":
            expected = [token(ask.prompt, n) for n in range(ask.max_tokens)]
            if any(given != expected for given in ask.tokens):
                raise Violation(f"wrong answer to {ask.id}: {ask.tokens}, not {expected}")
        elif not (ask.outcome == "cancelled" and ask.cancelled):
            raise Violation(f"{ask.id} ended as {ask.outcome}")

    # -- faults of our own --------------------------------------------------------------------------------------

    def _on_worker(self, action: Callable[[Worker], object]) -> Callable[[Machine, float | None], None]:
        def strike(machine: Machine, _length_s: float | None) -> None:
            if machine.id in self.workers and not self.workers[machine.id].session.presence.draining:
                machine.loop.call_soon(action, self.workers[machine.id])

        return strike

    def _change_role(self, worker: Worker) -> None:
        living = [w for w in self.workers.values() if w.machine.alive and w.machine.id not in self.left]
        serving = [w for w in living if w.session.presence.member.serves and w.session.presence.taking]
        others = [role for role in ROLES if role != worker.session.presence.member.role]
        if not set(serving) - {worker}:  # who takes the last one that serves away gets no answers
            others = [role for role in others if role != "prefill"]
        role = self.world.rng.choice(others)
        worker.session.service.begin_role(role, self.world.rng.choice((0.0, 0.5, 3.0)), lambda _: None)

    def _cancel_one(self, machine: Machine, _length_s: float | None) -> None:
        mine = [ask for ask in self.asks if ask.judge is machine and not ask.outcome]
        if mine:
            ask = self.world.rng.choice(mine)
            ask.cancelled = True
            assert ask.stream is not None
            machine.loop.call_soon(ask.stream.cancel)

    def _set(self, name: str) -> Callable[[Machine, float | None], None]:
        return lambda _machine, _length_s: setattr(self.cluster, name, 2)

    # -- search.Checks ------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        found = []
        for kind in ("REQ", "MOVED", "WORK", "PREFILL"):
            found += [f"{kind} {m.subject}" for m in self.world.server.streams[SUBJECTS.stream(kind)].messages.values()]
        for name, worker in self.workers.items():
            if not worker.machine.alive or name in self.left:
                continue
            found += [f"run {run.ref} {run.state.value} on {name}" for run in worker.session.runs.table]
            found += [f"engine of {name} runs {sequence}" for sequence in worker.engine.running]
            found += [f"engine of {name} offers {sequence}" for sequence in worker.engine.offers]
            assert worker.session.prefill_server is not None
            found += [f"prefill jobs on {name}: {worker.session.prefill_server.states()}"] * bool(worker.session.prefill_server)
            found += [f"hand-overs of {name}: {len(worker.session.prefill_client)}"] * bool(worker.session.prefill_client)
        for name, left in self.waiting.items():
            if any(machine.id == name for machine in self.world.living("J")):
                found += [f"waiting at {name}: {left}"] * bool(left)
        found += [f"open {ask.id}" for ask in self.asks if not ask.outcome and ask.judge.alive]
        return found or (["nothing has started"] if not self.asks else [])

    def verify(self) -> None:
        """Everything is checked as it happens."""
