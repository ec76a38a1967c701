"""Overdue requests: those whose deadline has passed, and those that have waited too long for a worker that may take them."""

from __future__ import annotations

from collections.abc import Callable

from headrace.router.placement.admission import Admission
from headrace.router.placement.costs.cost_matrix import CostMatrix, CostRow
from headrace.router.placement.disagg_planner import DisaggPlanner, no_prefill_worker
from headrace.router.placement.eligibility import comes
from headrace.router.placement.fairness.turn_queues import TurnQueues
from headrace.router.placement.load import LoadTable
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Shed, Waiting


class Unplaceable:
    """Watches a window for requests that no worker may take. They wait up to `patience_s` for one, or for a waking one."""

    def __init__(self, window: CostMatrix, loads: LoadTable, *, patience_s: float) -> None:
        self._window = window
        self._loads = loads
        self._patience_s = patience_s
        self._ids: dict[str, None] = {}

    def check(self, row: CostRow) -> None:
        """Watch a request that has come into the window, if no worker may take it."""
        if row.ineligible_since_s is not None:
            self._ids[row.request.id] = None

    def recheck(self) -> None:
        """Check all requests again, because the workers have changed."""
        self._ids.clear()
        for row in self._window.rows.values():
            self.check(row)

    def remove(self, request_id: str) -> None:
        """Stop watching a request, if it was watched."""
        self._ids.pop(request_id, None)

    def overdue(self, now_s: float) -> list[Shed]:
        """List the refusals of requests that have waited for too long."""
        found = []
        for request_id in list(self._ids):
            row = self._window.rows.get(request_id)
            if row is None or row.ineligible_since_s is None:
                self._ids.pop(request_id)
            elif now_s - row.ineligible_since_s > self._patience_s and not comes(row.request, self._loads):
                found.append(_shed(row.request, now_s - row.ineligible_since_s))
        return found


class OverdueRequests:
    """Finds the requests of one window that have waited for too long, and takes them out of the queue."""

    def __init__(
        self,
        settings: SchedulerSettings,
        loads: LoadTable,
        window: CostMatrix,
        queue: TurnQueues,
        admission: Admission,
        unplaceable: Unplaceable,
        disagg: DisaggPlanner,
    ) -> None:
        self._refuses_unready = settings.prefill_unready == "refuse"
        self._loads = loads
        self._window = window
        self._queue = queue
        self._admission = admission
        self._unplaceable = unplaceable
        self._disagg = disagg

    def shed(self, now_s: float, drop: Callable[[str], None]) -> list[Shed]:
        """List the refusals. Each request is handed to `drop`, which takes it out of the window."""
        late = []
        for request in self._queue.expired(now_s):
            drop(request.id)  # before the others are looked for, which it might be one of
            late.append(self._admission.late(request, now_s))
        refused = self._unplaceable.overdue(now_s) if len(self._loads) else []
        if self._refuses_unready:
            rows = self._disagg.refused(self._window, self._disagg.prefill_side(now_s))
            refused += [no_prefill_worker(row.request) for row in rows]
        for shed in refused:
            self._queue.remove(shed.request.id)
            drop(shed.request.id)
        return late + refused


def _shed(request: Waiting, waited_s: float) -> Shed:
    wants = [f"worker {request.worker!r}"] if request.worker else []
    wants += [f"label {label!r}" for label in sorted(request.require)]
    wants += [f"adapter {request.adapter!r}"] if request.adapter else []
    message = f"no live worker may take it since {waited_s:.1f} s: it wants {', '.join(wants) or 'one that does not drain'}"
    return Shed(request=request, code="no_eligible_worker", message=message, retry_after_s=5.0)
