"""Makes the tables of workers, pools and the whole deployment from what members and load reports say; reads nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.broker.messages import LoadReport, RouterMember, WorkerMember
from headrace.top.facts import worker_row


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
