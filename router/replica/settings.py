"""Declares when the index is written down as a snapshot, and how long snapshots and applied events are kept."""

from dataclasses import dataclass
from typing import Annotated

from headrace.base.setting import Setting
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
