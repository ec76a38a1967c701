"""Reads the console's tables from streams, buckets and components; each function reads one of them, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.broker.batches.record import BatchRecord
from headrace.broker.codec import NOT_DECODED, decode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Inspect, Inspection, Routed
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import RouterMember, WorkerMember
from headrace.broker.models.card_store import readable_members
from headrace.broker.models.cards import ModelCard
from headrace.commands.control import ask_all
from headrace.commands.dlq import read_letter, summary
from headrace.commands.trace import live_routers
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError, SubjectError
from headrace.jetstream.provision import StreamStatus, status
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.top import load_reports, stored_requests, worker_row
from headrace.up.runfile import run_file_of


class StartingWorker(NamedTuple):
    """A worker's process: its name, its pid, and since when (Unix time, rounded) it runs; 0 = unknown.

    `port`: where it tells how it stands, 0 = nowhere. `doing`: what its start is at; empty = it has not told.
    """

    name: str
    pid: int
    since: int
    port: int = 0
    doing: str = ""


Tables = dict[str, dict[str, dict[str, Any]]]


def deployment_tables(
    *,
    workers: Sequence[WorkerMember],
    reports: Mapping[str, LoadReport],
    routers: Iterable[RouterMember],
    frontends: int,
    stored: Mapping[str, Mapping[str, int]],
    now: float,
    starting: Sequence[StartingWorker] = (),
) -> Tables:
    """Return the tables `summary` (one row), `pools` and `workers`. `stored`: waiting requests by pool and class.

    `starting`: workers whose processes run and that have no lease yet.
    """
    rows = {member.worker: _worker(member, reports.get(member.worker), now) for member in workers}
    routers_of: dict[str, int] = {}
    for router in routers:
        routers_of[router.pool] = routers_of.get(router.pool, 0) + 1
    pools = {pool: _pool([], routers_of.get(pool, 0), stored.get(pool, {})) for pool in sorted({*stored, *routers_of})}
    by_pool: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        by_pool.setdefault(row["pool"], []).append(row)
    for pool, members in sorted(by_pool.items()):
        pools[pool] = {
            **_pool(members, routers_of.get(pool, 0), stored.get(pool, {})),
            "waking": [name for name, row in rows.items() if row["pool"] == pool and row["state"] == "waking"],
            "fleets": _fleets(members),
        }
    total = {name: sum(row[name] for row in rows.values()) for name in ("running", "slots", "queued", "tokens_s")}
    summary = {
        **total,
        "frontends": frontends,
        "routers": sum(routers_of.values()),
        "workers": len(rows),
        "serving": sum(row["state"] == "serving" for row in rows.values()),
        "waiting": sum(sum(classes.values()) for classes in stored.values()),
        "kv": _mean([row["kv"] for row in rows.values()]),
        "starting": [[one.name, one.since, one.doing] for one in starting],
    }
    return {"summary": {"deployment": summary}, "pools": pools, "workers": rows}


def _worker(member: WorkerMember, report: LoadReport | None, now: float) -> dict[str, Any]:
    """Return the row of a worker. Rounded, so that what did not change for a reader is not sent."""
    row = worker_row(member, report, now)
    return {
        "pool": row.pool,
        "model": row.model,
        "role": row.role,
        "fleet": row.fleet,
        "price": member.price,
        "state": row.state,
        "running": row.running,
        "slots": row.slots,
        "queued": row.waiting,
        "kv": None if row.kv_used is None else round(row.kv_used, 3),
        "blocks": report.blocks_total if report is not None else member.blocks,
        "tiers": row.tiers,
        "tokens_s": round(row.tokens_s, 1),
        "step_ms": round(row.step_s * 1000, 2),
        "late": row.state == "no report",
        "engine": f"{member.engine} {member.engine_version}".strip(),
        "host": member.host,
        "pid": member.pid,
        "started": round(member.started),
        "adapters": len(member.adapters),
        "ranks": member.ranks,
    }


def _pool(members: Sequence[Mapping[str, Any]], routers: int, stored: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model": members[0]["model"] if members else "",
        "workers": len(members),
        "serving": sum(row["state"] == "serving" for row in members),
        "routers": routers,
        "running": sum(row["running"] for row in members),
        "slots": sum(row["slots"] for row in members),
        "tokens_s": round(sum(row["tokens_s"] for row in members), 1),
        "kv": _mean([row["kv"] for row in members]),
        "waiting": {name: count for name, count in stored.items() if count},
        "since": None,  # when the oldest one was stored, where none of its workers serves
        "waking": [],
        "fleets": {},
    }


def _fleets(members: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return [serving, workers, running, slots, price] of each fleet; nothing where no worker is in one."""
    found: dict[str, list[float]] = {}
    for row in members:
        sums = found.setdefault(row["fleet"], [0, 0, 0, 0, 0])
        for at, more in enumerate((row["state"] == "serving", 1, row["running"], row["slots"])):
            sums[at] += more
        sums[4] = max(sums[4], row["price"])
    return found if any(found) else {}


def _mean(shares: Iterable[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return round(sum(known) / len(known), 3) if known else None


# Reads which workers the `headrace up` of this machine has started: those without a lease are still starting.

ANSWER_S = 0.5
MOST_BYTES = 65_536


def started_workers(data_dir: Path | None) -> list[StartingWorker]:
    """Return the workers that the run file of a data folder names; none without such a file, or for one of another version."""
    if data_dir is None:
        return []
    try:
        found = json.loads(run_file_of(data_dir).read_bytes())["workers"]
        return [
            StartingWorker(str(one["name"]), int(one["pid"]), _began(int(one["pid"])), int(one.get("metrics_port") or 0))
            for one in found
            if one["pid"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def start_of(worker: StartingWorker) -> StartingWorker:
    """Return a worker with the progress of its start, if it replies in time."""
    if not worker.port:
        return worker
    try:
        try:
            answer = urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/ready", timeout=ANSWER_S)
        except urllib.error.HTTPError as not_ready:
            answer = not_ready
        with answer:
            return worker._replace(doing=str(json.loads(answer.read(MOST_BYTES))["reason"] or ""))
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return worker


def _began(pid: int) -> int:
    """Return when a process began, 0 where that cannot be read."""
    try:
        return round(Path(f"/proc/{pid}").stat().st_ctime)
    except OSError:
        return 0


Rows = dict[str, dict[str, Any]]

MOST_STARTING = 8  # workers that are asked what their start is at
MOST_QUEUES = 200
MOST_AGES = 20  # queues whose oldest message is looked up
MOST_LETTERS = 200
MOST_BATCHES = 500
MAP_PLACEMENTS = 300  # the last ones, of all pools
MAP_PREFIXES = 40
MOST_CONSUMERS = 500
_HASH_BYTES = 8

_batch = msgspec.json.Decoder(BatchRecord)


class Readers:
    """The readers of one deployment over one connection."""

    def __init__(
        self, connection: Connection, names: Subjects, *, processes: Callable[[], list[StartingWorker]] = list
    ) -> None:
        """`processes`: reads the workers that a `headrace up` of this machine runs."""
        self._nats = connection
        self._names = names
        self._processes = processes

    async def deployment(self) -> Tables:
        """Read members, load reports and the depths of the queues."""
        entries = await self._nats.bucket(self._names.bucket("members")).entries(">")
        workers = list(readable_members([entry for entry in entries if entry.key.startswith("worker.")]))
        routers: list[RouterMember] = []
        for entry in entries:
            if entry.key.startswith("router."):
                with contextlib.suppress(WireError):
                    routers.append(decode(RouterMember, entry.value))
        tables = deployment_tables(
            workers=workers,
            reports=await load_reports(self._nats, self._names, workers),
            routers=routers,
            frontends=sum(entry.key.startswith("ingress.") for entry in entries),
            stored=await stored_requests(self._nats, self._names),
            now=time.time(),
            starting=await self._starting({member.pid for member in workers}),
        )
        for pool, row in tables["pools"].items():
            if row["waiting"] and not row["serving"]:
                row["since"] = await self._held_since(pool)
        return tables

    async def _starting(self, serving: set[int]) -> list[StartingWorker]:
        """Ask the processes without a lease what their start is at."""
        found = [one for one in await asyncio.to_thread(self._processes) if one.pid not in serving]
        told = await asyncio.gather(*(asyncio.to_thread(start_of, one) for one in found[:MOST_STARTING]))
        return [*told, *found[MOST_STARTING:]]

    async def _held_since(self, pool: str) -> float | None:
        """Return when the oldest stored request of a pool came, as Unix time rounded to seconds; None if there is none."""
        subject = self._names.req_filter_all(pool)
        found = [await self._oldest(stream, subject) for stream in ("REQ", "MOVED")]
        return min((at for at in found if at), default=None)

    async def queues(self) -> Rows:
        """Read how many requests wait, by pool, class and tenant, and how old the oldest one of the longest queues is."""
        found: list[tuple[str, str, dict[str, Any]]] = []
        for stream, kind in (("REQ", "req"), ("MOVED", "req"), ("WORK", "work"), ("JOB", "job")):
            with contextlib.suppress(JetStreamError):
                counts = await self._nats.subject_counts(self._names.stream(stream), self._names.all_of(kind))
                for subject, count in counts.items():
                    with contextlib.suppress(SubjectError):
                        found.append((stream, subject, {**self._queue(stream, subject), "stream": stream, "waiting": count}))
        found.sort(key=lambda one: (-one[2]["waiting"], one[1]))
        for stream, subject, row in found[:MOST_AGES]:
            row["oldest"] = await self._oldest(stream, subject)
        return {subject: row for _, subject, row in found[:MOST_QUEUES]}

    def _queue(self, stream: str, subject: str) -> dict[str, str]:
        if stream == "WORK":
            work = self._names.parse_work(subject)
            return {"pool": work.pool, "class": "", "tenant": "", "worker": work.worker}
        if stream == "JOB":
            job = self._names.parse_job(subject)
            return {"pool": job.model_slug, "class": "job", "tenant": job.tenant, "worker": ""}
        request = self._names.parse_req(subject)
        return {"pool": request.pool, "class": request.request_class, "tenant": request.tenant, "worker": ""}

    async def _oldest(self, stream: str, subject: str) -> float | None:
        """Return when the oldest message of a queue was stored, as Unix time rounded to seconds; None if it is gone."""
        with contextlib.suppress(JetStreamError):
            for message in await self._nats.subject_messages(self._names.stream(stream), subject, limit=1):
                return round(message.at) if message.at else None
        return None

    async def streams(self) -> Rows:
        """Read the streams and buckets: depth, bytes and the age of the oldest message."""
        return {
            one.stream: {
                "exists": one.exists,
                "about": one.description,
                "messages": one.messages,
                "bytes": one.bytes,
                "subjects": one.subjects,
                "last_seq": one.last_seq,
                "oldest_s": None if one.oldest_age_s is None else round(one.oldest_age_s),
                "consumers": len(one.consumers),
                "lag": sum(consumer.waiting_messages for consumer in one.consumers),
                "in_hand": sum(consumer.ack_pending for consumer in one.consumers),
                "redelivered": sum(consumer.redelivered for consumer in one.consumers),
                "readers": [
                    [c.name, c.waiting_messages, c.ack_pending, c.redelivered, c.open_pulls]
                    for c in sorted(one.consumers, key=lambda c: (-c.waiting_messages, c.name))[:MOST_CONSUMERS]
                ],
            }
            for one in await self.stream_states()
        }

    async def stream_states(self) -> list[StreamStatus]:
        return await status(self._nats, Topology(self._names))

    async def routers(self) -> Rows:
        members = await live_routers(self._nats, self._names)
        states = await ask_all(self._nats, self._names, [member.router for member in members], Inspect(), Inspection)
        return {
            f"{member.router} {member.pool}": {
                "router": member.router,
                "pool": member.pool,
                "host": member.host,
                "pid": member.pid,
                "started": round(member.started),
                "state": _router_state(state),
                **{name: state.states.get(name, 0) if state else None for name in ("waiting", "placing", "refusing")},
            }
            for member, state in zip(members, states, strict=True)
        }

    async def prefixes(self) -> Rows:
        """Read from the last placements which prefixes were sent to which workers, and how much of them was cached there."""
        return prefix_map(await self.placements(MAP_PLACEMENTS))

    async def placements(self, limit: int, before: int | None = None) -> list[tuple[int, Routed]]:
        """Return placements with their numbers in the stream, the newest first; `before`: older ones than this number."""
        stream = self._names.stream("ROUTE")
        state = await self._nats.stream_state(stream)
        last = state.last_seq if before is None else min(state.last_seq, before - 1)
        first = max(state.first_seq, last - limit + 1)
        if last < first:
            return []
        found = []
        pattern = f"{self._names.prefix}.route.*"
        for message in await self._nats.subject_messages(stream, pattern, limit=last - first + 1, start_seq=first):
            if message.seq <= last:
                with contextlib.suppress(WireError):
                    found.append((message.seq, decode(Routed, message.data)))
        return found[::-1]

    async def letters(self) -> Rows:
        stream = self._names.stream("DLQ")
        state = await self._nats.stream_state(stream)
        if not state.messages:
            return {}
        first = max(state.first_seq, state.last_seq - MOST_LETTERS + 1)
        messages = await self._nats.subject_messages(stream, ">", limit=MOST_LETTERS, start_seq=first)
        return {str(message.seq): summary(read_letter(message, self._names)) for message in messages}

    async def batches(self) -> Rows:
        records = []
        for entry in await self._nats.bucket(self._names.bucket("batches")).entries(">"):
            with contextlib.suppress(*NOT_DECODED):
                records.append(_batch.decode(entry.value))
        records.sort(key=lambda record: (-record.created, record.id))
        return {record.id: _batch_row(record) for record in records[:MOST_BATCHES]}

    async def models(self) -> Rows:
        rows = {}
        for entry in await self._nats.bucket(self._names.bucket("models")).entries(">"):
            with contextlib.suppress(WireError):
                card = decode(ModelCard, entry.value)
                rows[card.pool] = {
                    "model": card.model,
                    "namespace": card.namespace,
                    "kinds": list(card.kinds),
                    "context": card.context_length,
                    "block": card.block_size,
                    "tools": card.tool_parser or "",
                    "reasoning": card.reasoning_parser or "",
                    "media": sorted(card.media),
                    "aliases": list(card.aliases),
                    "adapters": list(card.adapters),
                }
        return rows


def prefix_map(placements: Iterable[tuple[int, Routed]]) -> Rows:
    """Return a row per prefix, named by its first block, with what each worker was sent of it: [requests, tokens, cached].

    Requests of fewer tokens than a block have no prefix. The prefixes with the most tokens come first.
    """
    found: dict[str, dict[str, Any]] = {}
    for _, one in placements:
        if len(one.hashes) < _HASH_BYTES:
            continue
        row = found.setdefault(one.hashes[:_HASH_BYTES].hex(), {"tokens": 0, "cached": 0, "requests": 0, "workers": {}})
        cached = max(0, one.tokens - one.uncached)
        seen = row["workers"].setdefault(one.worker, [0, 0, 0])
        for at, more in enumerate((1, one.tokens, cached)):
            seen[at] += more
        row["requests"] += 1
        row["tokens"] += one.tokens
        row["cached"] += cached
    largest = sorted(found.items(), key=lambda item: (-item[1]["tokens"], item[0]))[:MAP_PREFIXES]
    return dict(largest)


def _router_state(state: Inspection | None) -> str:
    if state is None:
        return "no answer"
    return "draining" if state.draining else "serving" if state.lease_held else "lease lost"


def _batch_row(record: BatchRecord) -> dict[str, Any]:
    return {
        "tenant": record.tenant,
        "endpoint": record.endpoint,
        "model": record.model,
        "status": record.status,
        "created": round(record.created),
        "expires": record.expires_at,
        "total": record.counts.total,
        "completed": record.counts.completed,
        "failed": record.counts.failed,
        "error": record.errors[0].message if record.errors else "",
    }
