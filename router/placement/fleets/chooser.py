"""The chooser of one router: what its window and the workers' reports say about fleets, as penalties on costs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from headrace.broker.messages.placements import FleetDecision, FleetOption
from headrace.router.placement.fleets.choice import (
    LATE,
    MEETS,
    PREFERENCE_S,
    UNKNOWN,
    Asker,
    FleetState,
    Forecast,
    Preference,
    prefer,
)
from headrace.router.placement.fleets.grid import FleetGrid
from headrace.router.placement.fleets.targets import Targets, target_of
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Waiting
from headrace.router.placement.worker_view import Floats, WorkerView

_STATES = {MEETS: "meets", LATE: "late", UNKNOWN: "unknown"}
_MOST_BEGUN = 65_536  # requests remembered whose answers have begun


class FleetChooser:
    """Prefers fleets for the requests of one router. Times are seconds of the scheduler's clock."""

    def __init__(
        self,
        settings: SchedulerSettings,
        loads: LoadTable,
        expected_output: Callable[[Waiting], float],
        grid: FleetGrid | None = None,
    ) -> None:
        """`expected_output`: the tokens that the answer to a request is expected to have."""
        self._settings = settings
        self._loads = loads
        self._expected_output = expected_output
        self._grid = grid
        self.routers = 1  # that share what waits
        self._preferences: dict[str, Preference] = {}  # of the last look
        self._fleets: list[FleetState] = []
        self._begun: OrderedDict[str, None] = OrderedDict()

    @property
    def several(self) -> bool:
        """There is more than one fleet to choose from."""
        return len(self._loads.fleets) > 1

    def note_begun(self, request_id: str) -> None:
        """Note that the answer to a request has begun: it is retried in no other fleet for the sake of a grid."""
        if self._grid is not None and self._grid.retries:
            self._begun[request_id] = None
            if len(self._begun) > _MOST_BEGUN:
                self._begun.popitem(last=False)

    def directed(self, request: Waiting) -> Waiting:
        """Name the fleet whose prefill workers are to compute the prompt, if a grid says so."""
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
        """Return the targets of a request, or the defaults."""
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
            routers=self.routers,
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
        """Say in a placement of the last look which fleet it is in, and why, if there is a choice of fleets."""
        return replace(placement, fleet=self._decision(placement.request, load)) if self.several else placement

    def on_trial(self, placement: Placement, load: WorkerLoad) -> Placement:
        """Say in the placement of a suspect which fleet it is in. No fleet was chosen for it."""
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
    """Predict the time between two tokens of one more sequence, on the curve learnt from the worker's reports."""
    return load.speed.step_s(prefill_tokens=0, decodes=load.running + 1)


def _finite(seconds: float) -> float:
    return round(seconds, 6) if isfinite(seconds) else -1.0
