"""Keeps what a request was told of its first token from being made wrong by the next placement. Sans-io.

An engine fills a step with all prompts that it has, so a prompt of twenty tokens ends with a step of eight thousand if a long
one is placed beside it before that step begins.  Where requests are told apart by their targets, and where one asks for a time
to first token, the prediction that it was placed by is a promise: until the engine has begun with the step that completes it,
nothing is placed beside it that makes its first token later by more than a part of the predicted time.  A long prompt waits for
the next step, which is a few milliseconds, and a request that has waited long itself lets much in beside it, so that under load
steps are as full as they were.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from headrace.router.placement.load import LoadTable
from headrace.router.placement.worker_view import Floats

MOST_EACH = 64  # kept on a worker, the last ones: where so many are placed at once, none can be kept
ARRIVAL_S = 0.005  # from a placement until an idle engine has begun with it


class _Promise(NamedTuple):
    """A prompt that no step has begun with, and by how much later its first token may still come."""

    begins_s: float
    slack_s: float


class Promises:
    """The promises on the workers of one router. Times are seconds of the scheduler's clock."""

    def __init__(self, loads: LoadTable, part: float) -> None:
        """`part`: of a predicted time to first token, by which other prompts may make it longer."""
        self._loads = loads
        self._part = part
        self._open: dict[str, list[_Promise]] = {}  # by worker

    def __len__(self) -> int:
        return sum(len(promises) for promises in self._open.values())

    def __bool__(self) -> bool:
        """Return whether there may be one that is not over."""
        return bool(self._open)

    def note(self, worker: str, *, begins_s: float, takes_s: float, ttft_s: float, now_s: float) -> None:
        """Note a placement: when the engine will begin with it, what it adds to that step, and its time from arrival."""
        left = [one._replace(slack_s=one.slack_s - takes_s) for one in self._current(worker, now_s)[1 - MOST_EACH :]]
        self._open[worker] = [*left, _Promise(begins_s + ARRIVAL_S, self._part * ttft_s)]

    def slack(self, now_s: float) -> Floats:
        """Return by how many seconds the next step of each worker may become longer: infinite where that breaks no promise."""
        slack = np.full(len(self._loads), inf)
        for worker in list(self._open):
            load, left = self._loads.get(worker), self._current(worker, now_s)
            if load is None or not left:
                del self._open[worker]
                continue
            self._open[worker] = left
            slack[load.column] = min(one.slack_s for one in left)
        return slack

    def next_s(self, now_s: float) -> float:
        """Return when the next promise is over; infinite without any."""
        if not self._open:
            return inf
        return min((one.begins_s for worker in self._open for one in self._current(worker, now_s)), default=inf)

    def _current(self, worker: str, now_s: float) -> list[_Promise]:
        return [one for one in self._open.get(worker, ()) if one.begins_s > now_s]
