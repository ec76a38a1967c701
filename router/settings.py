"""Settings of the router's process, of its sessions and of snapshots; those of its decisions are in
`router.placement.settings`.
"""

from dataclasses import dataclass, field
from typing import Annotated

from headrace.base.setting import Setting, port_setting
from headrace.broker.settings import Timing
from headrace.router.errors import SettingsInvalid

KEEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """Settings of snapshots. Durations in seconds. Raises SettingsInvalid naming an impossible one."""

    every_events: Annotated[
        int,
        Setting(
            "Cache events between two snapshots of the index, which shorten a router's start.",
            least=1,
            key="snapshot_events",
            after="router.index_entries",
        ),
    ] = 5_000
    every_s: Annotated[float, Setting("Longest time between snapshots, if there was an event.", least=1, key="snapshot_s")] = (
        60.0
    )
    keep: Annotated[
        int,
        Setting(
            "Snapshots to keep, with later cache events: the reach of `headrace replay index`.",
            least=KEEP,
            most=1000,
            key="snapshots",
        ),
    ] = KEEP
    refresh_s: float = 1200.0  # even when there was none: well before the events of others push the stream past it
    purge_after_s: float = 30.0  # a reader that stood still for less misses nothing
    lease_ttl_s: float = 6.0

    def __post_init__(self) -> None:
        for name, least in (("every_events", 1), ("every_s", 0), ("refresh_s", 0), ("keep", KEEP), ("purge_after_s", 0)):
            if not getattr(self, name) >= least:
                raise SettingsInvalid(f"snapshots: {name} must be {least} or more, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    timing: Timing = field(default_factory=Timing)
    window: Annotated[
        int,
        Setting(
            "Requests per class held for placement. Set it well above any burst, or waiting workers take a part.",
            "--window",
            least=1,
            most=20_000,
            metavar="N",
        ),
    ] = 2048
    batch_window: Annotated[
        int,
        Setting(
            "Batch requests per class held for placement; neighbours go to the same cache.",
            least=1,
            most=20_000,
            after="router.window",
        ),
    ] = 256
    index_wait_s: Annotated[
        float,
        Setting(
            "Longest wait at the start for the index to know the workers' caches.",
            least=0,
            most=3600,
            after="router.tuning",
        ),
    ] = 5.0
    wake_on_demand: Annotated[
        bool,
        Setting(
            "Wake a sleeping worker for requests that no other worker may take.",
            "--wake-on-demand",
        ),
    ] = False
    window_bytes: int = 256 * 1024 * 1024  # of all classes; beyond it nothing more is pulled
    max_placing: int = 512  # placements on their way at once
    max_refusing: int = 64  # refusals on their way at once
    look_s: float = 0.5  # the scheduler is asked this often although nothing has happened
    # A worker publishes no cache events if so many prefills, in this time, brought none.
    silent_prefills: int = 8
    silent_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    name: Annotated[
        str | None,
        Setting("Name of this router in logs. Default: generated.", "--name", metavar="ID", commands=("router",)),
    ] = None
    models: Annotated[
        tuple[str, ...],
        Setting(
            "Models to route for, separated by commas. Default: all of the namespace.",
            "--model",
            metavar="M",
            commands=("router",),
        ),
    ] = ()
    fleet_grid: Annotated[
        str | None,
        Setting(
            "File with the JSON of Dynamo's global router, whose grid names a group per request. Default: the "
            "cheapest group predicted to meet the targets.",
            "--fleet-grid",
            kind="path",
            metavar="FILE",
            after="router.itl_target_s",
        ),
    ] = None
    index_entries: Annotated[
        int,
        Setting(
            "Most blocks in a model's index, per worker and tier; 0: no limit. The least useful are dropped.",
            least=0,
            after="router.index_wait_s",
        ),
    ] = 10_000_000
    record: Annotated[bool, Setting("Record every placement, for `headrace replay`.", "--record", after="router.snapshots")] = (
        True
    )
    metrics_port: Annotated[
        int | None,
        port_setting(
            "Port for /live, /ready, /health and /metrics of the router; 0 picks a free one (`up`: of the first, "
            "the next count up). Default: none; under `up` 0; with a metrics address 9101.",
            "--router-metrics-port",
        ),
    ] = None
    metrics_host: Annotated[str, Setting("Address of that port; 0.0.0.0 is every address.", "--router-metrics-host")] = (
        "127.0.0.1"
    )
    drain_grace_s: Annotated[
        float,
        Setting(
            "Time for placements in flight to be confirmed after SIGTERM.",
            "--drain-grace",
            least=0,
            most=3600,
            commands=("router",),
        ),
    ] = 10.0
    start_timeout_s: Annotated[float, Setting("Longest wait for the NATS server at start.", least=0.1)] = 30.0
    namespace: str | None = None
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)
    session: SessionOptions = field(default_factory=SessionOptions)
