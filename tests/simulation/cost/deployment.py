"""One frontend, one router and one worker with the simulated engine, in virtual time, and a client that asks in a closed loop.

All of it is the code of the processes themselves, but for the connection to NATS, in whose place is the simulated server, and
for the sockets of clients, in whose place is a transport that takes everything.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import structlog
import uvicorn
from uvicorn.server import ServerState

from headrace.broker.ingress.ingress import Ingress
from headrace.broker.membership.members import Members
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.directory import publish_card
from headrace.broker.settings import IngressSettings, SessionSettings
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.frontend.app import build_frontend
from headrace.frontend.http.connections import Connections
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.router.index.blocks import Blocks, Words
from headrace.router.index.follower import KvFollower
from headrace.router.index.snapshotter import ReplicaDeps
from headrace.router.index.table import PrefixTable
from headrace.router.index.view import Caches
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.replay import Recorder
from headrace.router.session.session import RouterSession
from headrace.router.session.window import PoolIndex, RouterDeps
from headrace.router.settings import RouterOptions, SessionOptions
from headrace.workers.detokenize import TokenTable
from headrace.workers.engine import EngineConfig, Role
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.publisher import KvPublisher
from headrace.workers.kv.translator import Translator
from headrace.workers.registration import build_card, read_card_files
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.settings import WorkerSettings
from headrace.workers.sim.engine import SimEngine
from tests.simulation.cost.counted_processes import CountedProcess
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World

SUBJECTS = Subjects("hr")
POOL, MODEL = "m-0", "m"
CLIENTS = 8
# Steps that are longer than rows wait for more: each token is a frame and an event of its own, whatever comes in which order.
ENGINE = {"slots": CLIENTS, "timing_overrides": {"decode_base_s": 0.01}}
FIRST_S = 20.0  # by then all processes know each other
LAST_S = 600.0
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Cost:
    """The processes, and what their requests cost them."""

    def __init__(self) -> None:
        self.world = World(seed=1, config=CALM)
        self.processes: dict[str, CountedProcess] = {}
        self.answered: list[bytes] = []
        self._ask: asyncio.Event | None = None
        self._bodies: list[bytes] = []

    def calls(self, bodies: list[bytes]) -> dict[str, Counter[str]]:
        """Ask these requests from `CLIENTS` clients, and return the calls of each process by module. Once only."""
        # A turn of the frontend's loop has a budget of real time, which a busy machine overdraws.
        with _default_log(), self.world as world, patch.object(time, "perf_counter", lambda: self.world.now):
            world.server.install(Topology(subjects=SUBJECTS))
            for name, main in (("frontend", self._frontend), ("router", self._router), ("worker", self._worker)):
                world.process(name, main)
            world.run(FIRST_S)
            self._bodies = bodies[::-1]
            for process in self.processes.values():
                process.begin()
            assert self._ask is not None
            world.at(0.0, self._ask.set)
            assert world.run(LAST_S, stop=lambda: len(self.answered) == len(bodies), every_s=0.01), "some were not answered"
            for process in self.processes.values():
                process.end()
        return {name: process.calls() for name, process in self.processes.items()}

    def _counted(self, machine: Machine) -> None:
        self.processes[machine.name] = CountedProcess(machine.loop)

    async def _frontend(self, machine: Machine) -> None:
        self._counted(machine)
        self._ask = asyncio.Event()
        ingress = Ingress(machine.messaging, SUBJECTS, ingress_id=machine.id, settings=IngressSettings(), wall=machine.wall)
        settings = FrontendSettings()
        app = build_frontend(ingress, settings).app
        config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
        config.load()
        protocol = Connections(settings, Metrics()).protocol()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ingress.run())
            await self._ask.wait()
            for _ in range(CLIENTS):
                tasks.create_task(self._client(protocol(config, ServerState(), {})))

    async def _client(self, connection: Any) -> None:
        socket = Socket()
        connection.connection_made(socket)
        while self._bodies:
            body = self._bodies.pop()
            connection.data_received(HEAD % len(body) + body)
            self.answered.append(await socket.answer())

    async def _router(self, machine: Machine) -> None:
        self._counted(machine)
        members = Members(machine.messaging, SUBJECTS, lease_ttl_s=SessionOptions().timing.lease_ttl_s)
        index = PrefixTable(Blocks, Words)  # also where it is compiled, whose calls cannot be counted
        view = Caches(index)
        replica = ReplicaDeps(
            messaging=machine.messaging,
            subjects=SUBJECTS,
            pool=POOL,
            router=machine.id,
            block_size=16,
            settings=RouterOptions().snapshots,
        )
        follower = KvFollower(replica, view, index, members=members)
        deps = RouterDeps(
            messaging=machine.messaging,
            subjects=SUBJECTS,
            members=members,
            pool=POOL,
            router=machine.id,
            options=SessionOptions(),
            wall=machine.wall,
        )
        session = RouterSession(
            deps,
            Scheduler(SchedulerSettings(), view, name=machine.id),
            index=PoolIndex(view, follower.reader.sources, follower, index),
            record=Recorder(machine.messaging, SUBJECTS, pool=POOL, router=machine.id).placed,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(members.run())
            await session.run()

    async def _worker(self, machine: Machine) -> None:
        self._counted(machine)
        engine = SimEngine()
        runtime = Runtime(engine, stall_s=60.0)
        config = EngineConfig(model=MODEL, served_name=MODEL, role=Role.AGGREGATED, args=ENGINE)
        info = await engine.start(config, runtime.on_step)
        files = read_card_files(info.tokenizer_dir)
        card = build_card(WorkerSettings(model=MODEL), MODEL, info, files)
        await publish_card(machine.messaging, SUBJECTS, msgspec.structs.replace(card, pool=POOL, created=machine.wall()), files)
        member = WorkerMember(
            worker=machine.id,
            pool=POOL,
            model=MODEL,
            slots=info.slots,
            block_size=info.block_size,
            blocks=info.blocks,
            epoch=1,
            started=machine.wall(),
            engine="sim",
            kv_events=True,
        )
        translator = Translator(info.block_size, blocks=info.blocks)
        publisher = KvPublisher(
            machine.messaging, SUBJECTS, pool=POOL, worker=machine.id, epoch=1, inventory=translator.inventory
        )
        runtime.watch_cache(lambda: translator.device, tiers=translator.held)
        feed = KvFeed(engine, translator, publisher.step)
        deps = WorkerDeps(
            messaging=machine.messaging,
            subjects=SUBJECTS,
            settings=SessionSettings(slots=info.slots),
            wall=machine.wall,
            random_bits=machine.rng.getrandbits,
        )
        session = WorkerSession(deps, member, EnginePorts(executor=runtime, kv=publisher))
        runtime.attach(session.runs, info, TokenTable.load(info.tokenizer_dir))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(runtime.run())
            tasks.create_task(feed.run())
            await session.run()


@contextmanager
def _default_log() -> Iterator[None]:
    """Log as processes do by default, with a line for each request, but to nowhere."""
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=io.StringIO()),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


class Socket(asyncio.Transport):
    """Takes everything at once, and knows where a streamed answer ends."""

    def __init__(self) -> None:
        super().__init__()
        self._written = bytearray()
        self._more = asyncio.Event()

    async def answer(self) -> bytes:
        """Return the next answer, head and all. It is in chunks, or has no body."""
        while not self._written.endswith(b"0\r\n\r\n"):
            self._more.clear()
            await self._more.wait()
        written, self._written = bytes(self._written), bytearray()
        return written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written += data
        self._more.set()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        raise AssertionError(f"the connection was closed after {bytes(self._written[-500:])!r}")

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def chat(number: int, tokens: int, words: int = 32) -> bytes:
    """Return the body of a streamed chat with a prompt of its own."""
    prompt = " ".join(f"word{(number * 7 + n * n) % 97}" for n in range(words))
    message = {"role": "user", "content": f"{number} {prompt}"}
    return json.dumps(
        {"model": MODEL, "messages": [message], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
