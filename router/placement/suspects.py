"""The suspects in a router's window, and the workers that are on trial for them.

A suspect may crash its worker, so only a bounded part of the pool tries suspects, while the others serve everything else.  Each
trial worker gets as many at once as the smallest group limit among them allows, the most suspect ones first
(`headrace.broker.protocol.quarantine`); the rest waits here, and what is behind them in the window does not.

A pool of one worker tries suspects on that one.  Where a pool has one worker left because others have just died, suspects wait
for those that are due back (`LostWorkers`), ten seconds at most: until then the one that is left serves everything else.

How suspect a request is says its judge.  Until it is asked and has answered, the request is not placed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from headrace.broker.places import worker_of
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.pool import LostWorkers
from headrace.router.placement.types import Placement, Waiting

TRIAL_SHARE = 3  # one worker in so many may be on trial, and at least one


@dataclass(slots=True)
class WaitingSuspect:
    """A suspect in the window. `limit` None: its judge has not answered yet."""

    request: Waiting
    limit: int | None = None
    crashes: int = 0


class Suspects:
    """The suspects of one router's window, apart from the turns of all other requests."""

    def __init__(self, loads: LoadTable, lost: LostWorkers) -> None:
        self._loads = loads
        self._lost = lost
        self._waiting: dict[str, WaitingSuspect] = {}
        self._awaits_lost = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def awaiting_lost(self) -> int:
        """The suspects that wait for lost workers, if any do."""
        return len(self._waiting) if self._awaits_lost and self._loads.ordered else 0

    def add(self, request: Waiting) -> None:
        """Take in a request that may be suspect. One that was assessed before stays so."""
        self._waiting.setdefault(request.id, WaitingSuspect(request))

    def assess(self, request_id: str, limit: int, crashes: int) -> bool:
        """Note how suspect a request is. Returns whether it waits here and is no suspect after all: it leaves then."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        if not limit:
            self.remove(request_id)
            return True
        waiting.limit, waiting.crashes = limit, crashes
        return False

    def remove(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is not None and not self._waiting:
            self._release_workers()

    def due(self, now_s: float) -> list[WaitingSuspect]:
        """List the suspects to try now, the most suspect first. None is tried on the last worker while others are due back."""
        self._awaits_lost = False
        if not self._waiting:
            return []
        self._awaits_lost = self._loads.only_worker and self._lost.due(now_s) > 0
        if self._awaits_lost:
            self._release_workers()
            return []
        found = [one for one in self._waiting.values() if one.limit]
        return sorted(found, key=lambda one: (one.limit, -one.crashes, one.request.arrived_s))

    def choose(self, suspect: WaitingSuspect, columns: Collection[int]) -> WorkerLoad | None:
        """Choose the worker for a suspect among these columns; None = it waits.

        A trial worker with room goes first; else one more is made, the one with the fewest jobs, as one that has just started.
        """
        limit = suspect.limit or 0
        able = [load for load in self._loads if load.column in columns and _open(load)]
        room = [load for load in able if load.has_suspects and self._takes_suspect(load, limit)]
        if not room:
            tried = {worker_of(load.info.worker) for load in self._loads if load.has_suspects}
            workers = {worker_of(load.info.worker) for load in self._loads}
            if len(tried) < max(1, len(workers) // TRIAL_SHARE):
                room = [load for load in able if worker_of(load.info.worker) not in tried]
        return min(room, key=lambda load: (load.running, load.info.worker), default=None)

    def _takes_suspect(self, load: WorkerLoad, limit: int) -> bool:
        """Return whether one more suspect may run on this worker. Its ranks die together, so they count together."""
        ranks = self._ranks_of(load)
        there = load.reported_suspects + sum(rank.suspects_on_way for rank in ranks)
        return there < min(limit, *(rank.group_limit for rank in ranks))

    def _ranks_of(self, load: WorkerLoad) -> list[WorkerLoad]:
        worker = worker_of(load.info.worker)
        return [other for other in self._loads if worker_of(other.info.worker) == worker]

    def keep(self, load: WorkerLoad) -> None:
        """Keep a worker, all its ranks, on trial while suspects wait: else ordinary requests would come between two groups."""
        ranks = self._ranks_of(load)
        for rank in ranks:
            rank.kept_on_trial = bool(self._waiting) and len(self._loads) > len(ranks)
            rank.described = False

    def _release_workers(self) -> None:
        for load in self._loads:
            load.kept_on_trial = False
            load.described = False


def _open(load: WorkerLoad) -> bool:
    return not load.info.draining and load.full_s is None and load.slots_left(0) > 0


def on_trial(placement: Placement, suspect: WaitingSuspect) -> Placement:
    return dataclasses.replace(placement, limit=suspect.limit or 0, crashes=suspect.crashes)
