"""Choice among the worker groups (fleets) of a pool: targets of requests, predictions of each fleet, and preferences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan
from typing import NamedTuple

import numpy as np

from headrace.broker.messages.control import FleetDecision, FleetOption
from headrace.router.placement.fleet_grid import FleetGrid
from headrace.router.placement.load import WorkerLoad
from headrace.router.placement.pool import Pool
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Waiting
from headrace.router.placement.worker_view import Bools, Floats, Ints, WorkerView

MOST_TARGET_S = 1e6  # a longer one is none


class Targets(NamedTuple):
    """Targets in seconds. 0 is a target as any other: it is always missed, so the request goes where it is least late."""

    ttft_s: float
    itl_s: float


def target_of(asked_s: float | None, default_s: float) -> float:
    """Return a target in seconds: what was asked, clamped to what can be, else the default. NaN asks for nothing."""
    if asked_s is None or isnan(asked_s):
        return default_s
    return min(max(asked_s, 0.0), MOST_TARGET_S)


# The preference of a request among fleets: the cheapest one that is predicted to meet its targets, else the least late.
#
# A *fleet* is a part of a pool's workers that are alike: engine, hardware, parallelism, context length, price. All fleets are
# served from one queue by the same routers, so a request is bound to one when it is placed, not when it comes. The preference
# is a penalty on the costs of all workers of a fleet and no filter: where nothing else is left, any fleet serves.
#
# For each request r and worker w, in seconds:
#
#     late(r, w) = max(age(r) + ttft(r, w) + queue(fleet of w) - target(r), 0)
#     slow(r, w) = max(itl(w) - itl target(r), 0) × expected output of r
#
# `ttft` is the prediction that placement uses: the worker's queue, and the uncached prompt at the speed learnt from its
# reports. `itl` is a step with one more sequence, on the curve learnt likewise. `queue` is what the requests before r in the
# window will take of that fleet: they are gone through by age, each goes to the fleet that it prefers, and its work counts
# for the next ones. A worker meets the targets with late + slow = 0. Of one whose load report is old, or that has sent none,
# nothing is predicted: it is neither idle nor late, and comes after all of which something is known.

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


_STATES = {MEETS: "meets", LATE: "late", UNKNOWN: "unknown"}
_MOST_BEGUN = 65_536  # requests remembered whose answers have begun


class FleetChooser:
    """Prefers fleets for the requests of one router. Times are seconds of the scheduler's clock."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: Pool,
        expected_output: Callable[[Waiting], float],
        grid: FleetGrid | None = None,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._loads = pool.loads
        self._expected_output = expected_output
        self._grid = grid
        self._preferences: dict[str, Preference] = {}  # of the last look
        self._fleets: list[FleetState] = []
        self._begun: OrderedDict[str, None] = OrderedDict()

    @property
    def several(self) -> bool:
        return len(self._loads.fleets) > 1

    def note_begun(self, request_id: str) -> None:
        """Note that the answer to a request has begun: it is retried in no other fleet for the sake of a grid."""
        if self._grid is not None and self._grid.retries:
            self._begun[request_id] = None
            if len(self._begun) > _MOST_BEGUN:
                self._begun.popitem(last=False)

    def directed(self, request: Waiting) -> Waiting:
        if self._grid is None or self._grid.prefill is None:
            return request
        fleet = self._grid.prefill_fleet(
            tokens=request.tokens,
            ttft_s=request.ttft_target_s,
            itl_s=request.itl_target_s,
            priority=request.agent_priority,
        )
        return replace(request, prefill_fleet=fleet)

    def targets(self, request: Waiting) -> Targets:
        settings = self._settings
        return Targets(
            target_of(request.ttft_target_s, settings.ttft_target_s), target_of(request.itl_target_s, settings.itl_target_s)
        )

    def penalties(
        self, requests: Sequence[Waiting], ttft: Floats, service: Floats, workers: WorkerView, now_s: float
    ) -> Floats:
        """Return what is added to the cost of each request on each worker, in seconds.

        `ttft` and `service` (request × worker): predicted time to first token from now, and the part that an engine computes.
        """
        loads = self._loads.ordered
        known = np.array([self._is_known(load, now_s) for load in loads], dtype=np.bool_)
        itl = np.array([_itl_s(load) for load in loads])
        self._fleets = fleets = [self._state(name, known, workers) for name in self._loads.fleets]
        order = sorted(range(len(requests)), key=lambda at: requests[at].arrived_s)
        askers = [self._asker(requests[at], now_s) for at in order]
        found = prefer(
            askers,
            Forecast(ttft[order], service[order], itl, known),
            fleets,
            routers=self._pool.routers,
            margin=self._settings.target_margin,
        )
        fleet_at = np.zeros(len(loads), dtype=np.intp)
        for number, fleet in enumerate(fleets):
            fleet_at[list(fleet.columns)] = number
        penalties = np.zeros(ttft.shape)
        self._preferences.clear()
        for at, preference in zip(order, found, strict=True):
            request = requests[at]
            if self._grid is not None:
                preference = preference._replace(ranks=self._grid_ranks(request, self._grid))
            self._preferences[request.id] = preference
            penalties[at] = np.array(preference.ranks)[fleet_at] * PREFERENCE_S
        return penalties

    def _asker(self, request: Waiting, now_s: float) -> Asker:
        return Asker(self.targets(request), request.age_s(now_s), self._expected_output(request))

    def _is_known(self, load: WorkerLoad, now_s: float) -> bool:
        return load.report is not None and now_s - load.reported_s <= self._settings.stale_s and not load.info.draining

    def _state(self, name: str, known: np.ndarray, workers: WorkerView) -> FleetState:
        members = [load for load in self._loads if load.info.fleet == name]
        counted = [load for load in members if known[load.column]]
        return FleetState(
            name=name,
            price=min(load.info.price for load in members),
            columns=tuple(load.column for load in members),
            free_slots=sum(max(load.slots_left(0), 0) for load in counted),
            slots=sum(load.info.slots for load in counted),
            workers=len(counted),
            open=sum(workers.all_room[load.column] for load in counted),
        )

    # The grid of a configuration for Dynamo's global router.

    def _grid_ranks(self, request: Waiting, grid: FleetGrid) -> tuple[int, ...]:
        order = self._grid_order(request, grid)
        return tuple(order.index(fleet.name) if fleet.name in order else len(order) for fleet in self._fleets)

    def _grid_order(self, request: Waiting, grid: FleetGrid) -> tuple[str, ...]:
        order = grid.order(
            tokens=request.tokens,
            ttft_s=request.ttft_target_s,
            itl_s=request.itl_target_s,
            priority=request.agent_priority,
        )
        failed = 0 if request.id in self._begun else request.failures
        return (*order[failed % len(order) :], *order[: failed % len(order)]) if grid.retries else order

    # Explanations.

    def explained(self, placement: Placement, load: WorkerLoad) -> Placement:
        """Name the fleet of a placement of the last look, with the reason, if there is a choice of fleets."""
        return replace(placement, fleet=self._decision(placement.request, load)) if self.several else placement

    def on_trial(self, placement: Placement, load: WorkerLoad) -> Placement:
        """Name the fleet in the placement of a suspect. No fleet was chosen for it."""
        return replace(placement, fleet=self._unchosen(placement.request, load, "trial")) if self.several else placement

    def _unchosen(self, request: Waiting, load: WorkerLoad, reason: str) -> FleetDecision:
        targets = self.targets(request)
        return FleetDecision(fleet=load.info.fleet, reason=reason, ttft_target_s=targets.ttft_s, itl_target_s=targets.itl_s)

    def _decision(self, request: Waiting, load: WorkerLoad) -> FleetDecision:
        targets, preference = self.targets(request), self._preferences.get(request.id)
        chosen = load.info.fleet
        if preference is None:  # by a policy that knows no fleets
            return self._unchosen(request, load, "policy")
        options = [
            FleetOption(
                fleet=fleet.name,
                price=fleet.price,
                rank=rank,
                state=_STATES[outlook.state],
                ttft_s=_finite(outlook.ttft_s),
                itl_s=_finite(outlook.itl_s),
                late_s=_finite(outlook.late_s),
            )
            for fleet, rank, outlook in zip(self._fleets, preference.ranks, preference.outlooks, strict=True)
        ]
        return FleetDecision(
            fleet=chosen,
            reason=self._reason(chosen, request, options),
            ttft_target_s=targets.ttft_s,
            itl_target_s=targets.itl_s,
            options=options,
        )

    def _reason(self, chosen: str, request: Waiting, options: Sequence[FleetOption]) -> str:
        own = next((option for option in options if option.fleet == chosen), None)
        if own is None or own.rank > 0:
            return "overflow"  # the preferred fleet could not take it, and it had waited long enough
        if self._grid is not None:
            return self._grid.reason(request.agent_priority, retried=request.failures > 0 and request.id not in self._begun)
        if own.state == "unknown":
            return "unknown"
        if own.state == "late":
            return "least_late"
        return "cheapest" if own.price <= min(option.price for option in options) else "meets"


def _itl_s(load: WorkerLoad) -> float:
    return load.speed.step_s(prefill_tokens=0, decodes=load.running + 1)


def _finite(seconds: float) -> float:
    return round(seconds, 6) if isfinite(seconds) else -1.0
