"""The last leg of a placement: what follows from its outcome, once that is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.broker.messages import JobFault
from headrace.router.placement.types import Placement
from headrace.router.session import metrics
from headrace.router.session.fleet_metrics import count_decision
from headrace.router.session.held_request import HeldRequest
from headrace.router.session.placement_events import Announcer
from headrace.router.session.prediction_accuracy import PredictionAccuracy
from headrace.router.session.refusals import Refuser
from headrace.router.session.release import RequestRelease
from headrace.router.session.state import RouterState


class PlacementOutcomes:
    """Announces, records and releases placed requests; sends the others back to the scheduler or to the refuser.

    A request may have left the window while it was being placed, because its stream was deleted and made again.  Then its judge
    submits it again, and the outcome of the old placement changes nothing here.
    """

    def __init__(
        self,
        state: RouterState,
        release: RequestRelease,
        refuser: Refuser,
        announcer: Announcer,
        accuracy: PredictionAccuracy,
        record: Callable[[HeldRequest, Placement], None] | None = None,
    ) -> None:
        """`record` is called with every placement."""
        self._state = state
        self._release = release
        self._refuser = refuser
        self._announcer = announcer
        self._accuracy = accuracy
        self._record = record
        self._loop = asyncio.get_running_loop()

    def placed(self, held: HeldRequest, placement: Placement, *, duplicate: bool) -> None:
        """Release a request whose message is stored for its worker. A duplicate was announced by the router that stored it."""
        if not duplicate:
            self._announcer.placed(held, placement)
        metrics.PLACED.labels(placement.reason).inc()
        metrics.WAITED_S.observe(placement.waited_s)
        metrics.count_prefill(placement)
        if placement.fleet is not None:
            count_decision(self._state.window.pool, placement.fleet)
        self._accuracy.placed(placement)
        if self._record is not None:
            self._record(held, placement)
        self._release.settle(held)
        self._state.changed.set()

    def full(self, held: HeldRequest, placement: Placement) -> None:
        """Let a request wait again whose worker's queue takes nothing more, unless it was cancelled or must be given back."""
        if held.gone:
            return
        state = self._state
        state.scheduler.unplace(placement, self._loop.time())
        held.wait_again()
        if held.id in state.tombstones:
            self._release.drop(held, "cancelled")
        elif not state.permission.granted:
            state.scheduler.cancel([held.id])
            self._release.give_back(held)
        state.changed.set()

    def impossible(self, held: HeldRequest, fault: JobFault) -> None:
        """Refuse a request that no worker can be sent."""
        if not held.gone:
            self._refuser.refuse(held, fault)
