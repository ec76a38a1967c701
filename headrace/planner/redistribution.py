"""Decides what may leave: a what-if of the load on fewer workers, and the workers with the least held work."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planner.observation import WorkerSight

ROOM = 0.85  # of slots and KV blocks that the rest may be filled to


def fits(workers: Sequence[WorkerSight], rest: int, *, waiting: int, sequences: int) -> bool:
    """Return whether what these serving workers hold, and what waits, fits on `rest` of them.

    `sequences`: those that one may decode at once within its target. Where a load is unknown, nothing may leave.
    """
    if any(one.report_age_s is None for one in workers):
        return False
    held = sum(one.held for one in workers) + waiting
    if rest <= 0:
        return held == 0
    limits = [min(one.slots or sequences, sequences) for one in workers]
    if held > ROOM * rest * min(limits, default=sequences):
        return False
    used = [one.kv_used for one in workers if one.kv_used is not None]
    return not used or sum(used) / rest <= ROOM


def most_leaving(workers: Sequence[WorkerSight], leave: int, *, waiting: int, sequences: int) -> int:
    """Return how many of at most `leave` workers can go, 0 if none."""
    count = len(workers)
    for gone in range(min(leave, count), 0, -1):
        if fits(workers, count - gone, waiting=waiting, sequences=sequences):
            return gone
    return 0


def victims(workers: Sequence[WorkerSight], leave: int) -> list[WorkerSight]:
    """Return the workers with the least held work, those that fill the fewest blocks first among equals."""
    return sorted(workers, key=lambda one: (one.held, one.kv_used or 0.0, one.worker))[:leave]
