"""When the index is written down, and how long what was read is kept."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.router.errors import SettingsInvalid

KEEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """Durations in seconds. Raises SettingsInvalid naming what cannot be."""

    every_events: int = 5_000
    every_s: float = 60.0  # when there was any event
    refresh_s: float = 1200.0  # even when there was none: well before the events of others push the stream past it
    keep: int = KEEP  # snapshots, and with them the part of the stream behind the oldest: `headrace replay` reaches back so far
    purge_after_s: float = 30.0  # a reader that stood still for less misses nothing
    lease_ttl_s: float = 6.0

    def __post_init__(self) -> None:
        for name, least in (("every_events", 1), ("every_s", 0), ("refresh_s", 0), ("keep", KEEP), ("purge_after_s", 0)):
            if not getattr(self, name) >= least:
                raise SettingsInvalid(f"snapshots: {name} must be {least} or more, got {getattr(self, name)!r}")
