"""Settings of the router's sessions and of its process; how it decides is `router.settings`."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.broker.settings import Timing
from headrace.router.replica.settings import SnapshotSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What one router does in one pool. Durations in seconds."""

    timing: Timing = field(default_factory=Timing)
    window: int = 2048  # requests of one class held un-acked: well above any burst, or waiting workers take a part of it
    window_bytes: int = 256 * 1024 * 1024  # of all classes; beyond it nothing more is pulled
    max_placing: int = 512  # placements on their way at once
    max_refusing: int = 64  # refusals on their way at once
    index_wait_s: float = 5.0  # longest wait at start for the index to catch up
    look_s: float = 0.5  # the scheduler is asked this often although nothing has happened
    silent_prefills: int = 8  # so many prefills without one cache event show that a worker publishes none …
    silent_s: float = 5.0  # … in this time


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """One router process."""

    name: str | None = None
    namespace: str | None = None
    models: tuple[str, ...] = ()  # empty: all of the namespace
    metrics_port: int | None = None
    drain_grace_s: float = 10.0
    start_timeout_s: float = 30.0
    index_entries: int = 10_000_000  # blocks in the index of one pool, counted once per worker and tier; 0 = no limit
    record: bool = True  # keep a record of every placement, for `headrace replay`
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)
    session: SessionOptions = field(default_factory=SessionOptions)
