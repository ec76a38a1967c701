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
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from headrace.broker.places import worker_of
from headrace.router.placement.cost import CostMatrix
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.turn_queues import TurnQueues
from headrace.router.placement.types import Placement, Waiting
from headrace.router.placement.worker_registry import LostWorkers

TRIAL_SHARE = 3  # one worker in so many may be on trial, and at least one


@dataclass(slots=True)
class WaitingSuspect:
    """A suspect in the window. `limit` None: its judge has not answered yet."""

    request: Waiting
    limit: int | None = None
    crashes: int = 0


class Trials:
    """The suspects of one router's window. Pure: `choose` only says what could be placed where."""

    def __init__(self, loads: LoadTable) -> None:
        self._loads = loads
        self._waiting: dict[str, WaitingSuspect] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

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
            self.release_workers()

    def in_order(self) -> list[WaitingSuspect]:
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

    @property
    def only_worker(self) -> bool:
        """True where a trial would leave no worker for ordinary requests, of those that stay."""
        return self._loads.only_worker

    def keep(self, load: WorkerLoad) -> None:
        """Keep a worker, all its ranks, on trial while suspects wait: else ordinary requests would come between two groups."""
        ranks = self._ranks_of(load)
        for rank in ranks:
            rank.kept_on_trial = bool(self._waiting) and len(self._loads) > len(ranks)
            rank.described = False

    def release_workers(self) -> None:
        for load in self._loads:
            load.kept_on_trial = False
            load.described = False


def _open(load: WorkerLoad) -> bool:
    return not load.info.draining and load.full_s is None and load.slots_left(0) > 0


# Places the suspects of a router's window on trial workers, apart from the turns of all other requests.
#
# A suspect stays counted in the queue, and takes no turn there until its judge has said that it is none.

Place = Callable[[WaitingSuspect, WorkerLoad], Placement]


class Suspects:
    """The suspects of one router's window, and their place in its queue."""

    def __init__(self, loads: LoadTable, window: CostMatrix, queue: TurnQueues) -> None:
        self._window = window
        self._queue = queue
        self.lost = LostWorkers()
        self._awaiting_lost = False
        self._trials = Trials(loads)

    def __len__(self) -> int:
        return len(self._trials)

    @property
    def awaiting_lost(self) -> int:
        return len(self) if self._awaiting_lost else 0

    def hold(self, request: Waiting) -> None:
        if request.suspect:
            self._trials.add(request)
            self._queue.hold(request.id)

    def assess(self, request_id: str, limit: int, crashes: int) -> None:
        """Note what the judge of a request says. One that is no suspect (limit 0) takes its turn again."""
        if self._trials.assess(request_id, limit, crashes):
            self._queue.release(request_id)

    def unplace(self, placement: Placement) -> None:
        """Hold a suspect again whose placement did not happen. Any other request is ignored."""
        if placement.limit:
            self.hold(placement.request)
            self._trials.assess(placement.request.id, placement.limit, placement.crashes)

    def remove(self, request_id: str) -> None:
        self._trials.remove(request_id)

    def place(self, place: Place, now_s: float) -> list[Placement]:
        placed: list[Placement] = []
        if not len(self):
            self._awaiting_lost = False
            return placed
        self._awaiting_lost = self._trials.only_worker and self.lost.due(now_s) > 0
        if self._awaiting_lost:
            self._trials.release_workers()
            return placed
        for suspect in self._trials.in_order():
            row = self._window.rows[suspect.request.id]
            eligible = np.flatnonzero(self._window.eligible[row.number])
            load = self._trials.choose(suspect, frozenset(eligible.tolist()))
            if load is not None:
                placed.append(place(suspect, load))
                self._trials.keep(load)
        return placed


def on_trial(placement: Placement, suspect: WaitingSuspect) -> Placement:
    return dataclasses.replace(placement, limit=suspect.limit or 0, crashes=suspect.crashes)
