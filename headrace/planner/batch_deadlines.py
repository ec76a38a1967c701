"""Derives from batch work and its deadlines how many workers it needs, and when none has to be started yet.

    required = max over t of B(t) / (R · (t − C))

`B(t)`: requests due within `t` seconds, waiting, claimed and running ones alike; `R`: requests a second of a worker; `C`: the
seconds that a worker takes to start.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

ENOUGH = 0.85  # of a worker: while less is required, batch work sleeps if nothing else needs a worker


def required(backlog: Iterable[tuple[float, int]], *, per_s: float, start_s: float) -> float:
    """Return the workers that are required, as a fraction. What is due before a worker could start counts as due right then."""
    due, most = 0, 0.0
    for left_s, count in sorted(backlog):
        due += max(0, count)
        room_s = max(left_s - start_s, 1.0)
        most = max(most, due / (per_s * room_s))
    return most


def batch_workers(backlog: Iterable[tuple[float, int]], *, per_s: float, start_s: float, awake: bool) -> int:
    """Return whole workers. A pool without one (`awake` False) sleeps until the work is worth a start."""
    wanted = required(backlog, per_s=per_s, start_s=start_s)
    if not awake and wanted < ENOUGH:
        return 0
    return ceil(wanted - 1e-9)
