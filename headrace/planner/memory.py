"""Stores what a planner knows of a pool and takes it over again, so that a restart forgets nothing.

The forecasters are not stored: they read the stored series again and are then as they were.
"""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from headrace.planner.pool_planner import PoolPlanner

log = structlog.get_logger()

VERSION = 1


class Stored(msgspec.Struct, kw_only=True):
    """The stored form."""

    version: int
    model: str
    pool: str
    seen_s: float | None
    arrived_s: float | None
    series: dict[str, Any]
    starts: dict[str, Any]
    requests: dict[str, Any]
    curves: dict[str, dict[str, Any]]
    roles: dict[str, dict[str, Any]]
    confidence: float = 0.0  # 0: that of the settings
    peak: dict[str, Any] | None = None  # None: stored by an earlier version


def dump(planner: PoolPlanner, *, model: str, pool: str) -> bytes:
    """Return the bytes to store."""
    return msgspec.msgpack.encode(
        Stored(
            version=VERSION,
            model=model,
            pool=pool,
            seen_s=planner.seen_s,
            arrived_s=planner.arrived_s,
            series=planner.series.dump(),
            starts=planner.starts.dump(),
            requests=planner.requests.dump(),
            curves={role: curve.dump() for role, curve in planner.curves.items()},
            confidence=planner.confidence.value,
            peak=planner.peak.dump(),
            roles={role: history.dump() for role, history in planner.roles.items()},
        )
    )


def load(planner: PoolPlanner, data: bytes, *, model: str, pool: str) -> bool:
    """Take stored bytes over into a fresh planner. Returns False, and logs, for those of another version, model or pool."""
    try:
        stored = msgspec.msgpack.decode(data, type=Stored)
        if (stored.version, stored.model, stored.pool) != (VERSION, model, pool):
            raise ValueError(f"it is version {stored.version} of {stored.model} in {stored.pool}")
        planner.series.load(**stored.series)
        planner.starts.load(**stored.starts)
        planner.requests.load(**stored.requests)
        for role, curve in planner.curves.items():
            curve.load(**stored.curves[role])
        for role, history in planner.roles.items():
            history.load(**stored.roles[role])
        if stored.peak is not None:
            planner.peak.load(**stored.peak)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
        log.warning("planner.memory_unreadable", pool=pool, error=str(error))
        return False
    planner.confidence.load(stored.confidence)
    planner.seen_s, planner.arrived_s = stored.seen_s, stored.arrived_s
    planner.book = planner.new_book()
    return True
