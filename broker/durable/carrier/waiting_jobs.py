"""Chooses which of the waiting jobs starts next: by class, then by the tenants' shares, then by what is due first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import count

from headrace.broker.durable.carrier.held_job import HeldJob

RANKS = {"hi": 0, "std": 1, "batch": 2}


class WaitingJobs:
    """The held jobs that have not started, in a queue for each class and tenant."""

    def __init__(self) -> None:
        self._by_seq: dict[int, HeldJob] = {}
        self._queues: dict[tuple[int, str], list[tuple[float, int, int, HeldJob]]] = {}  # with jobs that were removed, too
        self._added = count()  # jobs of one sequence, of which one was removed, are not compared

    def __len__(self) -> int:
        return len(self._by_seq)

    def add(self, held: HeldJob) -> None:
        """Add a job. No other one of its sequence may wait."""
        self._by_seq[held.seq] = held
        queue = self._queues.setdefault((RANKS[held.job.request_class], held.job.tenant), [])
        heappush(queue, (held.job.deadline, held.seq, next(self._added), held))

    def remove(self, held: HeldJob) -> None:
        """Forget a job. One that does not wait is fine."""
        if self._by_seq.get(held.seq) is held:
            del self._by_seq[held.seq]
        if not self._by_seq:
            self._queues.clear()

    def take(self, started: Mapping[str, int]) -> HeldJob | None:
        """Take the job to start next, None if none waits. `started`: each tenant's jobs that have started and not ended."""
        best: tuple[int, int, float, int] | None = None
        chosen: HeldJob | None = None
        for (rank, tenant), queue in list(self._queues.items()):
            held = self._first(queue)
            if held is None:
                del self._queues[rank, tenant]
            elif best is None or (rank, started.get(tenant, 0), held.job.deadline, held.seq) < best:
                best, chosen = (rank, started.get(tenant, 0), held.job.deadline, held.seq), held
        if chosen is not None:
            self.remove(chosen)
        return chosen

    def _first(self, queue: list[tuple[float, int, int, HeldJob]]) -> HeldJob | None:
        while queue:
            held = queue[0][3]
            if self._by_seq.get(held.seq) is held:
                return held
            heappop(queue)
        return None
