"""Runs a deployment of the simulator into whose processes faults can be injected, and restarts each one that ends.

Unlike `headrace up` it restarts every process at once, also one that ended on purpose, and it may run several frontends.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from headrace.base.errors import StartFailed
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Inspect, Inspection
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.commands.control import ask_all, live_workers
from headrace.commands.trace import live_routers
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError, RequestTimeout
from headrace.jetstream.ports import Message
from headrace.jetstream.provision import status
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology
from headrace.tools.chaos.client import Address, NetworkProxy
from headrace.tools.chaos.questions import PARSER_FLAGS
from headrace.up.parts import choose_port, get
from headrace.up.process import Child, headrace_command, kill_group

HOST = "127.0.0.1"
MODEL = "sim"
_RESTART_AFTER_S = 0.5
_STOP_GRACE_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentShape:
    """The number of processes of each kind, and the settings of the simulator."""

    mode: str = "aggregated"
    workers: int = 3  # that answer requests
    prefill_workers: int = 2  # only with the mode disagg
    routers: int = 2
    frontends: int = 2
    drain_grace_s: float = 3.0  # Shorter than the longest answers, so that some are handed over.
    frontend_grace_s: float = 3.0  # Shorter than the longest answers, so that some are cut.
    engine_arguments: Sequence[str] = ('timing_overrides={"decode_base_s": 0.02, "prefill_tokens_per_s": 20000}',)


@dataclass(slots=True, eq=False)
class Process:
    """A process of the deployment. `kind`: worker, prefill, router or frontend. `started`: Unix time of its last start."""

    name: str
    kind: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: TextIO
    port: int = 0  # of a frontend
    child: Child | None = None
    started: float = 0.0
    frozen: bool = False
    leaving: bool = False
    link: NetworkProxy | None = None  # between the process and the NATS server
    cut: bool = False  # or slow

    @property
    def pid(self) -> int:
        return self.child.pid if self.child else 0

    @property
    def can_be_hurt(self) -> bool:
        return self.child is not None and not (self.frozen or self.leaving or self.cut)


class ChaosDeployment:
    """Runs the deployment as an async context manager. After the block all its processes have ended."""

    def __init__(self, folder: Path, shape: DeploymentShape) -> None:
        """`folder` holds the server's data and the log of each process."""
        self.folder = folder
        self.shape = shape
        self.server = EmbeddedServer(folder / "nats")
        self.processes: list[Process] = []
        self._scope = TaskScope()
        self._tasks: list[asyncio.Task[None]] = []
        self._links = AsyncExitStack()
        self._ending = False

    async def __aenter__(self) -> Self:
        """Raises StartFailed."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        try:
            await self.server.start_async()
        except (JetStreamError, OSError) as error:
            raise StartFailed(f"the NATS server does not start: {error}") from error
        await self._scope.__aenter__()
        self.processes = self._plan()
        for process in self.processes:
            process.env = {**process.env, "HEADRACE_NATS_URL": await self._link(process)}
        self._tasks = [self._scope.spawn(self._keep_running(process), name=process.name) for process in self.processes]
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self._ending = True
        for process in self.processes:
            if process.frozen:
                self.thaw(process)
            self.mend(process)
        stopping = [p.child.stop(grace_s=_STOP_GRACE_S) for p in self.processes if p.child is not None and p.kind != "frontend"]
        await asyncio.gather(*stopping)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scope.__aexit__(None, None, None)
        await self._links.aclose()
        for process in self.processes:
            process.log.close()
        self.server.resume()
        await self.server.stop_async()

    def of_kind(self, kind: str) -> list[Process]:
        return [process for process in self.processes if process.kind == kind]

    @property
    def frontends(self) -> list[Address]:
        return [Address(process.name, HOST, process.port) for process in self.of_kind("frontend")]

    # -- faults ------------------------------------------------------------------------------------------------------------
    def kill(self, process: Process) -> None:
        """Send SIGKILL to the process and all processes that it has started."""
        if process.child is not None:
            kill_group(process.pid)

    def freeze(self, process: Process) -> None:
        if process.child is not None:
            process.frozen = True
            kill_group(process.pid, signal.SIGSTOP)

    def thaw(self, process: Process) -> None:
        process.frozen = False
        if process.child is not None:
            kill_group(process.pid, signal.SIGCONT)

    def cut(self, process: Process, *, late_s: float | None = None) -> None:
        """Until `mend`, let the link of the process carry nothing, or with `late_s` everything that much later."""
        if process.link is not None:
            process.cut = True
            if late_s is None:
                process.link.cut()
            else:
                process.link.slow(late_s)

    def mend(self, process: Process) -> None:
        if process.link is not None:
            process.link.mend()
        process.cut = False

    async def drain(self, process: Process, *, timeout_s: float) -> bool:
        """Send SIGTERM and wait until the process has ended. Returns False if it had to be killed."""
        child = process.child
        if child is None:
            return True
        process.leaving = True
        os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while process.child is child and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        process.leaving = False
        if process.child is child:
            child.kill()
            return False
        return True

    async def frontends_ready(self) -> bool:
        answers = [await get(HOST, process.port, "/ready") for process in self.of_kind("frontend")]
        return all(status == 200 for status, _ in answers)

    async def _link(self, process: Process) -> str:
        """Open the link of a process to the NATS server. Returns the address that the process is given."""
        process.link = await self._links.enter_async_context(NetworkProxy(HOST, self.server.port))
        return process.link.url

    # -- running -----------------------------------------------------------------------------------------------------------
    async def _keep_running(self, process: Process) -> None:
        while not self._ending:
            process.started = time.time()
            child = await Child.start(
                headrace_command(*process.argv), env=process.env, on_lines=lambda lines: _note(process, *lines)
            )
            process.child = child
            try:
                code = await child.wait()
            except asyncio.CancelledError:
                child.kill()
                await child.wait()
                raise
            finally:
                process.child = None
                process.frozen = False
            _note(process, json.dumps({"event": "part.ended", "exit_code": code}))
            await asyncio.sleep(_RESTART_AFTER_S)

    def _plan(self) -> list[Process]:
        shape = self.shape
        arguments = [word for argument in shape.engine_arguments for word in ("--engine-arg", argument)]
        disagg = shape.mode == "disagg"
        serving = "decode" if disagg else "aggregated"
        planned = []

        def worker(name: str, role: str) -> tuple[str, ...]:
            return ("worker", "--engine", "sim", "--role", role, "--name", name, *PARSER_FLAGS, *arguments)

        planned += [self._process(f"frontend-{n}", "frontend", ("frontend",)) for n in range(1, shape.frontends + 1)]
        planned += [
            self._process(f"{serving}-{n}", "worker", worker(f"{serving}-{n}", serving)) for n in range(1, shape.workers + 1)
        ]
        if disagg:
            names = [f"prefill-{n}" for n in range(1, shape.prefill_workers + 1)]
            planned += [self._process(name, "prefill", worker(name, "prefill")) for name in names]
        names = [f"router-{n}" for n in range(1, shape.routers + 1)]
        planned += [self._process(name, "router", ("router", "--name", name)) for name in names]
        return planned

    def _process(self, name: str, kind: str, argv: tuple[str, ...]) -> Process:
        port = 0
        if kind == "frontend":
            port = choose_port(HOST, 0)
            argv = (*argv, "--port", str(port))
        log = (self.folder / "logs" / f"{name}.log").open("a", buffering=1, errors="replace")
        return Process(name, kind, argv, self._environment(), log, port=port)

    def _environment(self) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        plain |= {
            "HEADRACE_LOG_FORMAT": "json",
            "HEADRACE_WORKER_DRAIN_GRACE_S": f"{self.shape.drain_grace_s:g}",
            "HEADRACE_ROUTER_DRAIN_GRACE_S": f"{self.shape.drain_grace_s:g}",
            "HEADRACE_FRONTEND_DRAIN_GRACE_S": f"{self.shape.frontend_grace_s:g}",
            # The frontends may be up before the NATS server is, and then have to wait for it.
            "HEADRACE_FRONTEND_START_TIMEOUT_S": "60",
        }
        if self.shape.mode == "disagg":
            plain |= {"HEADRACE_ROUTER_PREFILL": "always", "HEADRACE_WORKER_PREFILL": "always"}
        return plain


def _note(process: Process, *lines: str) -> None:
    process.log.writelines(f"{line}\n" for line in lines)


_QUEUES = ("REQ", "MOVED", "WORK", "PREFILL")
_REPORTS_S = 0.6  # load reports come five times a second
_QUIET_POLL_S = 0.5
_OPEN_REQUESTS = re.compile(rb"^headrace_frontend_requests_in_flight (\S+)$", re.MULTILINE)
_OWN_CONSUMER = re.compile(r"W_(?P<work>[^~]+)(?:~.*)?|P_(?P<prefill>.+)_own")


@dataclass(frozen=True, slots=True)
class Residue:
    """State left in an idle deployment. `counts`, by displayed name, must be 0. `orphans`: consumers without a live worker."""

    counts: dict[str, int]
    orphans: list[str]


async def is_well(deployment: ChaosDeployment, connection: Connection, names: Subjects) -> bool:
    """Return whether every process of the deployment runs, and each worker and router holds a lease."""
    processes = deployment.processes
    if not deployment.server.running or not all(process.can_be_hurt for process in processes):
        return False
    try:
        pids = {member.pid for member in await live_workers(connection, names) if not member.draining}
        routers = await live_routers(connection, names)
    except (JetStreamError, WireError, TimeoutError):
        return False
    for process in processes:
        if process.kind in ("worker", "prefill") and process.pid not in pids:
            return False
        if process.kind == "router" and not any(
            member.router.startswith(f"{process.name}-") and member.started >= process.started for member in routers
        ):
            return False
    return await deployment.frontends_ready()


async def until_well(deployment: ChaosDeployment, connection: Connection, names: Subjects, *, timeout_s: float) -> bool:
    """Wait until the deployment is well. Returns False if it is not within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await is_well(deployment, connection, names):
                await asyncio.sleep(_QUIET_POLL_S)
    except TimeoutError:
        return False
    return True


async def until_at_rest(connection: Connection, names: Subjects, frontends: Sequence[Address], *, timeout_s: float) -> Residue:
    """Wait until all counts are zero or `timeout_s` is over. Returns the last residue.

    Raises RequestTimeout if the broker does not answer when the time is over; before, as in an election, it is asked again.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            found = await residue(connection, names, frontends)
            if not any(found.counts.values()) or loop.time() >= deadline:
                return found
        except RequestTimeout:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_QUIET_POLL_S)


async def residue(connection: Connection, names: Subjects, frontends: Sequence[Address]) -> Residue:
    """Count the state that a deployment without requests should not have. A process that does not reply counts as one."""
    workers = await live_workers(connection, names)
    ids = [member.worker for member in workers]
    states = await ask_all(connection, names, ids, Inspect(), Inspection)
    routers = [member.router for member in await live_routers(connection, names)]
    held = await ask_all(connection, names, routers, Inspect(), Inspection)
    reports = await _reports(connection, names, workers)
    streams = {found.stream: found for found in await status(connection, Topology(names))}
    queues = [streams[names.stream(queue)] for queue in _QUEUES]
    consumers = [consumer for queue in queues for consumer in queue.consumers]
    left = orphans([consumer.name for consumer in consumers], ids)
    counts = {
        "open requests": sum([await _open_requests(frontend) for frontend in frontends]),
        "in flight": sum(1 if state is None else max(len(state.runs), sum(state.states.values())) for state in states),
        "held by routers": sum(1 if state is None else sum(state.states.values()) for state in held),
        "queued": sum(queue.messages for queue in queues),
        "unacknowledged": sum(consumer.ack_pending for consumer in consumers),
        "sequences": sum(1 if report is None else report.running + report.waiting for report in reports),
        "blocks held": sum(report.blocks_used for report in reports if report is not None),
        "orphan consumers": len(left),
    }
    return Residue(counts, left)


def orphans(consumers: Sequence[str], workers: Sequence[str]) -> list[str]:
    """Return the worker-owned consumers whose worker is not live."""
    found = []
    for name in consumers:
        match = _OWN_CONSUMER.fullmatch(name)
        if match and (match["work"] or match["prefill"]) not in workers:
            found.append(name)
    return found


async def _reports(connection: Connection, names: Subjects, workers: Sequence[WorkerMember]) -> list[LoadReport | None]:
    """Return the next load report of each worker, None for a worker that sends none."""
    found: dict[str, LoadReport] = {}

    def on_report(message: Message) -> None:
        report = decode(LoadReport, message.data)
        found[report.worker] = report

    subscriptions = [
        await connection.subscribe(names.load_filter(pool), on_report) for pool in sorted({member.pool for member in workers})
    ]
    await asyncio.sleep(_REPORTS_S)
    for subscription in subscriptions:
        await subscription.unsubscribe()
    return [found.get(member.worker) for member in workers]


async def _open_requests(frontend: Address) -> int:
    status_code, body = await get(frontend.host, frontend.port, "/metrics")
    match = _OPEN_REQUESTS.search(body)
    return int(float(match[1])) - 1 if status_code == 200 and match else 1  # This request for the metrics is in flight itself.
