"""Places the suspects of a router's window on trial workers, apart from the turns of all other requests.

A suspect stays counted in the queue, and takes no turn there until its judge has said that it is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from headrace.router.placement.costs.cost_matrix import CostMatrix
from headrace.router.placement.fairness.turn_queues import TurnQueues
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.suspects.lost_workers import LostWorkers
from headrace.router.placement.suspects.trials import Trials, WaitingSuspect
from headrace.router.placement.types import Placement, Waiting

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
        """Count the suspects that wait, as of the last `place`, because dead workers are due back."""
        return len(self) if self._awaiting_lost else 0

    def hold(self, request: Waiting) -> None:
        """Take a request that may be suspect out of the turns of the others. Any other request is ignored."""
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
        """Forget a request: it was placed, or has ended. An unknown one is ignored."""
        self._trials.remove(request_id)

    def place(self, place: Place, now_s: float) -> list[Placement]:
        """Place the suspects for which a trial worker has room, the most suspect first. `place` carries each one out."""
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
    """Return the placement of a suspect, with what its judge has said."""
    return dataclasses.replace(placement, limit=suspect.limit or 0, crashes=suspect.crashes)
