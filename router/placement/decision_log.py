"""The decision log: recent decisions of a router, kept to be explained to operators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.broker.messages import Candidate, Explanation, PrefillDecision
from headrace.router.index.types import NO_OVERLAP, Overlap
from headrace.router.placement.array_costs import Costs, costs
from headrace.router.placement.cost_matrix import CostMatrix, CostRow, Floats
from headrace.router.placement.eligibility import why_not
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.policies import Pick
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Shed, Waiting
from headrace.router.placement.worker_view import WorkerView


@dataclass(frozen=True, slots=True)
class DecisionSnapshot:
    """The state that a decision was made in. It is put into words only for an explanation."""

    names: tuple[str, ...]
    reasons: tuple[str, ...]  # why a worker may not take it
    overlaps: Mapping[str, Overlap]
    uncached: Floats
    work: Floats
    workers: WorkerView
    ways: Costs | None = None  # where prompts may be computed elsewhere

    def candidates(self) -> list[Candidate]:
        """List the workers with their costs, cheapest first."""
        found = []
        workers = self.workers
        cost = workers.wait_s + self.work * workers.token_s + workers.step_s
        room = workers.room
        if self.ways is not None:
            cost, room = np.where(np.isfinite(self.ways.cost[0]), self.ways.cost[0], cost), self.ways.free[0]
        for column, (name, reason) in enumerate(zip(self.names, self.reasons, strict=True)):
            overlap = self.overlaps.get(name, NO_OVERLAP)
            found.append(
                Candidate(
                    worker=name,
                    device=overlap.device,
                    host=overlap.host,
                    disk=overlap.disk,
                    uncached=int(self.uncached[column]),
                    pending=int(workers.all_pending[column]),
                    running=workers.all_running[column],
                    wait_s=round(workers.all_wait_s[column], 6),
                    cost_s=round(float(cost[column]), 6),
                    room=bool(room[column]),
                    why_not=reason,
                )
            )
        return sorted(found, key=lambda one: (bool(one.why_not), one.cost_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """A decision, with its reason."""

    id: str
    state: str
    reason: str
    worker: str = ""
    at_s: float
    waited_s: float
    predicted_ttft_s: float = 0.0
    snapshot: DecisionSnapshot | None = None
    prefill: PrefillDecision | None = None


class DecisionLog:
    """Keeps the last `most` decisions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decisions: OrderedDict[str, LoggedDecision] = OrderedDict()

    def add(self, decision: LoggedDecision) -> None:
        self._decisions.pop(decision.id, None)
        self._decisions[decision.id] = decision
        while len(self._decisions) > self._most:
            self._decisions.popitem(last=False)

    def placed(self, placement: Placement, snapshot: DecisionSnapshot, now_s: float) -> None:
        self.add(
            LoggedDecision(
                id=placement.request.id,
                state="placed",
                reason=placement.reason,
                worker=placement.worker,
                at_s=now_s,
                waited_s=placement.waited_s,
                predicted_ttft_s=placement.predicted_ttft_s,
                snapshot=snapshot,
                prefill=placement.prefill,
            )
        )

    def shed(self, shed: Shed, now_s: float) -> None:
        waited_s = max(now_s - shed.request.arrived_s, 0.0)
        self.add(LoggedDecision(id=shed.request.id, state="refused", reason=shed.code, at_s=now_s, waited_s=waited_s))

    def get(self, request_id: str) -> LoggedDecision | None:
        return self._decisions.get(request_id)


def reason_of(row: CostRow, load: WorkerLoad, overlap: Overlap, pick: Pick, window: CostMatrix, policy: str) -> str:
    """Return the reason for this worker, in one word."""
    if row.request.worker:
        return "direct"
    if row.session == load.column:
        return "session"
    if np.count_nonzero(window.eligible[row.number]) == 1:
        return "only"
    if policy != "kv":
        return policy
    if pick.aged:
        return "aged"
    best = max((found.blocks for found in row.overlaps.values()), default=0)
    return "prefix" if overlap.blocks and overlap.blocks >= best else "load"


def take_snapshot(
    row: CostRow, window: CostMatrix, loads: LoadTable, workers: WorkerView, settings: SchedulerSettings
) -> DecisionSnapshot:
    """Keep the present state as seen by this request."""
    disagg = workers.prefill is not None
    return DecisionSnapshot(
        names=tuple(load.info.worker for load in loads),
        reasons=reasons(row.request, loads),
        overlaps=row.overlaps,
        uncached=window.uncached[row.number].copy(),
        work=window.work[row.number].copy(),
        workers=workers,
        ways=costs(window, np.array([row.number]), workers, 0.0, settings) if disagg else None,
    )


def waiting_decision(row: CostRow, snapshot: DecisionSnapshot, now_s: float) -> LoggedDecision:
    """Describe the present state of a waiting request in the form of a decision."""
    waited_s = max(now_s - row.request.arrived_s, 0.0)
    return LoggedDecision(id=row.request.id, state="waiting", reason="", at_s=now_s, waited_s=waited_s, snapshot=snapshot)


def reasons(request: Waiting, loads: LoadTable) -> tuple[str, ...]:
    """Return, per column, the reason for which that worker may not take the request; empty if it may."""
    if not request.worker and not request.require and not request.adapter:
        return tuple("draining" if load.info.draining else "" for load in loads)
    return tuple(why_not(request, load) for load in loads)


def explanation(decision: LoggedDecision, *, router: str, policy: str) -> Explanation:
    """Make the message that explains a decision; its `at` is on the scheduler's clock."""
    return Explanation(
        id=decision.id,
        router=router,
        policy=policy,
        state=decision.state,
        worker=decision.worker,
        reason=decision.reason,
        at=decision.at_s,
        waited_s=round(decision.waited_s, 6),
        predicted_ttft_s=round(decision.predicted_ttft_s, 6),
        candidates=decision.snapshot.candidates() if decision.snapshot is not None else [],
        prefill=decision.prefill,
    )
