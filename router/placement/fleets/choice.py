"""The preference of a request among fleets: the cheapest one that is predicted to meet its targets, else the least late.

A *fleet* is a part of a pool's workers that are alike: engine, hardware, parallelism, context length, price.  All fleets are
served from one queue by the same routers, so a request is bound to one when it is placed, not when it comes.  The preference is
a penalty on the costs of all workers of a fleet and no filter: where nothing else is left, any fleet serves.

For each request r and worker w, in seconds:

    late(r, w) = max(age(r) + ttft(r, w) + queue(fleet of w) - target(r), 0)
    slow(r, w) = max(itl(w) - itl target(r), 0) × expected output of r

`ttft` is the prediction that placement uses: the worker's queue, and the uncached prompt at the speed learnt from its reports.
`itl` is a step with one more sequence, on the curve learnt likewise.  `queue` is what the requests before r in the window will
take of that fleet: they are gone through by age, each goes to the fleet that it prefers, and its work counts for the next ones.
A worker meets the targets with late + slow = 0.  Of one whose load report is old, or that has sent none, nothing is
predicted: it is neither idle nor late, and comes after all of which something is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from headrace.router.placement.fleets.targets import Targets
from headrace.router.placement.worker_view import Bools, Floats, Ints

PREFERENCE_S = 1e5  # seconds of cost that set one fleet apart from the next: more than any prediction
MEETS, LATE, UNKNOWN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class FleetState:
    """A fleet as one decision sees it. `columns`: all of its workers; the numbers below count those whose load is known."""

    name: str
    price: float  # of one worker for an hour, in any unit that all fleets share
    columns: tuple[int, ...]
    free_slots: int = 0
    slots: int = 0
    workers: int = 0  # of which something is known
    open: int = 0  # of those, how many would take a prompt now


class FleetOutlook(NamedTuple):
    """The prediction of one request on one fleet, by its best worker. Infinite times: nothing is known."""

    ttft_s: float  # from arrival
    itl_s: float
    state: int  # MEETS, LATE or UNKNOWN
    late_s: float


class Preference(NamedTuple):
    """The order of the fleets for one request: a rank for each, 0 first, and equal ranks where only cost decides."""

    ranks: tuple[int, ...]
    outlooks: tuple[FleetOutlook, ...]


class Asker(NamedTuple):
    """A request that waits: its targets, age, and the output tokens that are expected of it."""

    targets: Targets
    age_s: float
    output: float


class FleetQueues:
    """The queue before each fleet, as it grows while the requests of a window are gone through."""

    def __init__(self, fleets: Sequence[FleetState], routers: int) -> None:
        self._fleets = fleets
        self._routers = routers  # each has a window like this one
        self._count = [0] * len(fleets)
        self._prefill_s = [0.0] * len(fleets)
        self._held_s = [0.0] * len(fleets)

    def wait_s(self, fleet: int) -> float:
        """Return what the requests before this one take: slots until they end, or engines until their prompts are computed."""
        state, count = self._fleets[fleet], self._count[fleet]
        if not count or not state.workers:
            return 0.0
        waiting = count * self._routers  # each of them takes a free slot or an open worker first
        slots_s = max(waiting - state.free_slots, 0) / count * self._held_s[fleet] / state.slots if state.slots else 0.0
        engines_s = max(waiting - state.open, 0) / count * self._prefill_s[fleet] / state.workers
        return max(slots_s, engines_s)

    def add(self, fleet: int, *, prefill_s: float, held_s: float) -> None:
        """Count a request that prefers this fleet: seconds of an engine for its prompt, and of a slot until its end."""
        self._count[fleet] += 1
        self._prefill_s[fleet] += prefill_s
        self._held_s[fleet] += held_s


class Forecast(NamedTuple):
    """The predictions of one decision. `ttft` and `service`: request × worker; `itl` and `known`: per worker."""

    ttft: Floats  # seconds from now to the first token, infinite where the request may not go
    service: Floats  # seconds of it that an engine computes
    itl: Floats  # seconds between two tokens, with one more sequence
    known: Bools  # its load is reported, and not long ago


def prefer(
    askers: Sequence[Asker], forecast: Forecast, fleets: Sequence[FleetState], *, routers: int = 1, margin: float = 0.0
) -> list[Preference]:
    """Return the preference of each request, in their order, which is that of their age.

    `margin`: the part of a target that is kept back for errors of the prediction.
    """
    queues = FleetQueues(fleets, routers)
    views = [_view(askers, forecast, fleet) for fleet in fleets]
    found = []
    for row, asker in enumerate(askers):
        seen = [_outlook(view, row, asker, margin, queues.wait_s(n)) for n, view in enumerate(views)]
        outlooks = tuple(outlook for outlook, _ in seen)
        ranks = _ranks(outlooks, fleets)
        first = ranks.index(0)
        best, own_s = seen[first]
        if best.state != UNKNOWN:
            queues.add(first, prefill_s=own_s, held_s=own_s + best.itl_s * asker.output)
        found.append(Preference(ranks, outlooks))
    return found


class _Candidate(NamedTuple):
    """A worker for each request: seconds to the first token, between tokens, of tokens too late, and of computing."""

    first_s: list[float]
    itl_s: list[float]
    slow_s: list[float]
    service_s: list[float]


class _FleetView(NamedTuple):
    """The workers of a fleet that can be best for a request: the soonest that is not too slow, the least late of all."""

    soonest: _Candidate
    least_late: _Candidate


def _view(askers: Sequence[Asker], forecast: Forecast, fleet: FleetState) -> _FleetView:
    """Look at the workers of one fleet with all requests at once: a window has a hundred, and a decision looks at each."""
    own = np.array(fleet.columns, dtype=np.intp)
    first = forecast.ttft[:, own] + np.array([[asker.age_s] for asker in askers])
    first = np.where(forecast.known[own], first, np.inf)
    over = np.maximum(forecast.itl[own] - np.array([[asker.targets.itl_s] for asker in askers]), 0.0)
    slow = over * np.array([[max(asker.output, 1.0)] for asker in askers])
    service, every = forecast.service[:, own], np.arange(len(askers))

    def candidate(at: Ints, first: Floats) -> _Candidate:
        values = (first[every, at], forecast.itl[own][at], slow[every, at], service[every, at])
        return _Candidate(*(value.tolist() for value in values))

    in_time = np.where(slow > 0.0, np.inf, first)
    return _FleetView(candidate(in_time.argmin(axis=1), in_time), candidate((first + slow).argmin(axis=1), first))


def _outlook(view: _FleetView, row: int, asker: Asker, margin: float, queue_s: float) -> tuple[FleetOutlook, float]:
    """Predict a request on a fleet behind a queue. Return the outlook, and the seconds in which an engine computes."""
    aim_s = asker.targets.ttft_s * (1.0 - margin)
    choice, late_s = view.soonest, view.soonest.first_s[row] + queue_s - aim_s
    if late_s > 0.0:
        other_s = max(view.least_late.first_s[row] + queue_s - aim_s, 0.0) + view.least_late.slow_s[row]
        if other_s < late_s:
            choice, late_s = view.least_late, other_s
    first_s = choice.first_s[row] + queue_s
    if first_s == inf:
        return FleetOutlook(inf, inf, UNKNOWN, inf), 0.0
    return FleetOutlook(first_s, choice.itl_s[row], MEETS if late_s <= 0.0 else LATE, max(late_s, 0.0)), choice.service_s[row]


def _ranks(outlooks: Sequence[FleetOutlook], fleets: Sequence[FleetState]) -> tuple[int, ...]:
    """Rank the fleets: those that meet the targets by price, the late ones by how late, and what is not known last."""
    keys = [
        (one.state, fleet.price if one.state != LATE else one.late_s, fleet.price)
        for one, fleet in zip(outlooks, fleets, strict=True)
    ]
    order = sorted(set(keys))
    return tuple(order.index(key) for key in keys)
