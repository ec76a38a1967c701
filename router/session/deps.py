"""The dependencies that every part of a router session shares: where it works, and what it reads and writes through."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.membership.members import Members
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.settings import SessionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDeps:
    """Dependencies of one router in one pool. `router` is the id of this session; `wall` returns Unix time.

    The owner of the session runs `members`.
    """

    messaging: Messaging
    subjects: Subjects
    members: Members
    pool: str
    router: str
    block_size: int = 0  # tokens of the pool's blocks; 0 = those of every worker
    options: SessionOptions = field(default_factory=SessionOptions)
    wall: Callable[[], float] = time.time
