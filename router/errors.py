"""The errors of a router.

RouterError
├── UnknownWorker        an operation names a worker that the index or the scheduler does not have
├── SnapshotError        a snapshot cannot be used
│   ├── SnapshotCorrupt  truncated, or its digest does not match
│   ├── SnapshotForeign  of another pool, block size or stream
│   └── SnapshotTooNew   written by a newer version
├── SettingsInvalid      a policy or setting that does not exist or cannot be
├── TraceInvalid         a line of a trace that is no request
└── ReplayStalled        in a benchmark: requests are open and nothing moves any more
"""

from __future__ import annotations

from headrace.base.errors import HeadraceError


class RouterError(HeadraceError):
    """Root of the errors of this package."""


class UnknownWorker(RouterError):
    """An operation names a worker that the index or the scheduler does not have."""


class SnapshotError(RouterError):
    """A snapshot cannot be used. The router goes on with an older one, else with the inventories of all workers."""


class SnapshotCorrupt(SnapshotError):
    """The snapshot is truncated or altered."""


class SnapshotForeign(SnapshotError):
    """The snapshot belongs to another pool, block size or stream."""


class SnapshotTooNew(SnapshotError):
    """The snapshot was written by a newer version."""


class SettingsInvalid(RouterError):
    """A setting cannot have this value. The message names both."""


class TraceInvalid(RouterError):
    """A line of a trace is no request. The message names the file, the line and the fault."""


class ReplayStalled(RouterError):
    """A replayed trace came to a halt with open requests. The message tells when and how many."""


def need(holds: bool, name: str, value: object, what: str) -> None:
    """Raise SettingsInvalid naming the setting and its value unless `holds`."""
    if not holds:
        raise SettingsInvalid(f"{name} must be {what}, got {value!r}")
