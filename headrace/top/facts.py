"""Reads what a deployment does now, for `headrace top`: its parts, their load, and what waits in its streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import LoadReport, WorkerMember
from headrace.broker.models.card_store import readable_members
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects

STALE_S = 2.0  # a report that is older is ten reports late
ASKED_AT_ONCE = 500  # reports
STREAMS = ("REQ", "MOVED", "WORK", "PREFILL", "JOB", "DLQ")

State = Literal["serving", "draining", "asleep", "paused", "waking", "no report"]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and its last load report. `tokens_s`: sequences that got a token in its last engine step, per second of it."""

    worker: str
    pool: str
    model: str
    role: str
    state: State
    fleet: str = ""  # of several that serve its model; empty = its operator named none
    running: int = 0
    slots: int = 0
    waiting: int = 0
    kv_used: float | None = None  # share of its KV blocks, 0 to 1; None = not told
    tokens_s: float = 0.0
    step_s: float = 0.0
    tiers: list[int] = []  # blocks that its prefix cache holds: device, host, disk; empty = not told
    report_age_s: float | None = None


class StreamRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stream and what is in it. `messages` None: it could not be read."""

    stream: str
    messages: int | None = None


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: its routers, and its stored requests by class, those that routers hold included."""

    pool: str
    routers: int = 0
    stored: dict[str, int] = {}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment at one time (Unix)."""

    at: float
    frontends: int
    pools: tuple[PoolRow, ...]
    workers: tuple[WorkerRow, ...]
    streams: tuple[StreamRow, ...]


async def read_snapshot(messaging: Messaging, names: Subjects) -> Snapshot:
    """Read everything once. Raises a JetStreamError if the parts cannot be listed; what else is missing is shown as missing."""
    entries = await messaging.bucket(names.bucket("members")).entries(">")
    members = sorted(
        readable_members([entry for entry in entries if entry.key.startswith("worker.")]), key=lambda member: member.worker
    )
    routers: dict[str, int] = {}
    for entry in entries:
        kind, _, rest = entry.key.partition(".")
        if kind == "router":
            pool = rest.partition(".")[0]
            routers[pool] = routers.get(pool, 0) + 1
    now = time.time()
    reports = await load_reports(messaging, names, members)
    stored = await stored_requests(messaging, names)
    pools = sorted({member.pool for member in members} | set(routers) | set(stored))
    return Snapshot(
        at=now,
        frontends=sum(entry.key.startswith("ingress.") for entry in entries),
        pools=tuple(PoolRow(pool=pool, routers=routers.get(pool, 0), stored=stored.get(pool, {})) for pool in pools),
        workers=tuple(worker_row(member, reports.get(member.worker), now) for member in members),
        streams=tuple([await _stream(messaging, names, stream) for stream in STREAMS]),
    )


def worker_row(member: WorkerMember, report: LoadReport | None, now: float) -> WorkerRow:
    """Return the row of a worker. `now` is Unix time; clocks of machines may differ by less than `STALE_S`."""
    state: State = "serving"
    if member.sleeping:
        state = "waking" if member.waking else "asleep"
    elif member.paused:
        state = "paused"
    elif member.draining:
        state = "draining"
    elif report is None or now - report.at > STALE_S:
        state = "no report"
    row = WorkerRow(
        worker=member.worker,
        pool=member.pool,
        model=member.model,
        role=member.role,
        state=state,
        fleet=member.fleet,
        slots=member.slots,
    )
    if report is None:
        return row
    return msgspec.structs.replace(
        row,
        running=report.running,
        waiting=report.waiting,
        kv_used=report.blocks_used / report.blocks_total if report.blocks_total else None,
        tokens_s=report.step_decodes / report.step_s if report.running and report.step_s > 0 else 0.0,
        step_s=report.step_s,
        tiers=report.tiers,
        report_age_s=max(0.0, now - report.at),
    )


async def load_reports(messaging: Messaging, names: Subjects, members: Sequence[WorkerMember]) -> dict[str, LoadReport]:
    """Return the last load report of each worker that has one."""
    if not members:
        return {}
    found: dict[str, LoadReport] = {}
    with contextlib.suppress(JetStreamError):  # the stream is in memory, and gone for a moment after a restart of the server
        subjects = [names.load(member.pool, member.worker) for member in members]
        for some in (subjects[i : i + ASKED_AT_ONCE] for i in range(0, len(subjects), ASKED_AT_ONCE)):
            for message in await messaging.last_messages(names.stream("LOAD"), some):
                with contextlib.suppress(WireError):
                    report = decode(LoadReport, message.data)
                    found[report.worker] = report
    return found


async def stored_requests(messaging: Messaging, names: Subjects) -> dict[str, dict[str, int]]:
    """Return the stored requests by pool and class, those that routers hold included."""
    stored: dict[str, dict[str, int]] = {}
    for kind in ("REQ", "MOVED"):
        with contextlib.suppress(JetStreamError):
            for subject, count in (await messaging.subject_counts(names.stream(kind), names.all_of("req"))).items():
                request = names.parse_req(subject)
                classes = stored.setdefault(request.pool, dict.fromkeys(REQUEST_CLASSES, 0))
                classes[request.request_class] += count
    return stored


async def _stream(messaging: Messaging, names: Subjects, stream: str) -> StreamRow:
    try:
        state = await messaging.stream_state(names.stream(stream))
    except JetStreamError:
        return StreamRow(stream=stream)
    return StreamRow(stream=stream, messages=state.messages)
