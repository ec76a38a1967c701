"""The dependencies that the parts of a replica of one pool's index share: where it works, and its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.replica.settings import SnapshotSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDeps:
    """Dependencies of one pool's replica in one router. `block_size` is in tokens; `wall` returns Unix time."""

    messaging: Messaging
    subjects: Subjects
    pool: str
    router: str
    block_size: int
    settings: SnapshotSettings = field(default_factory=SnapshotSettings)
    wall: Callable[[], float] = time.time
