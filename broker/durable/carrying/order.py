"""Chooses which of the waiting jobs starts next: by class, then by the tenants' shares, then by what is due first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.broker.durable.carrying.held_job import HeldJob

RANKS = {"hi": 0, "std": 1, "batch": 2}


def next_job(waiting: Iterable[HeldJob], started: Mapping[str, int]) -> HeldJob | None:
    """Return the job to start next, None if none waits. `started`: jobs of each tenant that were started and have not ended."""

    def key(held: HeldJob) -> tuple[int, int, float, int]:
        job = held.job
        return RANKS[job.request_class], started.get(job.tenant, 0), job.deadline, held.seq

    return min(waiting, key=key, default=None)
