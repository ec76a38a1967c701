"""Checks that a deployment is well, and that it is quiescent: nothing in flight, queued, held or left behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import Inspect, Inspection, LoadReport, WorkerMember
from headrace.commands.explain import live_routers
from headrace.commands.operating.control import live_workers
from headrace.commands.operating.control_client import ask_all
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError, RequestTimeout
from headrace.jetstream.ports import Message
from headrace.jetstream.provision import status
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.tools.chaos.client import Address
from headrace.tools.chaos.deployment import ChaosDeployment
from headrace.up.frontend_probe import get

_QUEUES = ("REQ", "MOVED", "WORK", "PREFILL")
_REPORTS_S = 0.6  # load reports come five times a second
_POLL_S = 0.5
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
                await asyncio.sleep(_POLL_S)
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
        await asyncio.sleep(_POLL_S)


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
