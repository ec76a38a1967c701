"""The dependencies that all parts of a worker session share, as one frozen record."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.settings import SessionSettings, Timing
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeps:
    """The connection, the names, the settings, the clock and the chance of one worker.

    `frames` is a connection of its own for tokens; None: tokens go over `messaging`.  `wall` gives Unix time, `random_bits(64)`
    makes run ids.  `secret` is a part of the names of the worker's consumers, which keeps other logins from pulling its work,
    and `pool_secret` of those that the workers of its pool share.
    `revokes`: its login may end the leases of other workers of its pool, when they are dead.
    """

    messaging: Messaging
    subjects: Subjects
    settings: SessionSettings = field(default_factory=SessionSettings)
    frames: Messaging | None = None
    secret: str = ""
    pool_secret: str = ""
    revokes: bool = True
    wall: Callable[[], float] = time.time
    random_bits: Callable[[int], int] = random.SystemRandom().getrandbits

    @property
    def timing(self) -> Timing:
        return self.settings.timing
