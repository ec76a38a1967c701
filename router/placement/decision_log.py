"""The decision log: recent decisions of a router, kept to be explained to operators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.broker.messages.control import Candidate, Decided, Explanation, FleetDecision
from headrace.broker.messages.requests import PrefillDecision
from headrace.router.index.types import NO_OVERLAP, Overlap
from headrace.router.placement.cost import CostMatrix, CostRow
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.pair_costs import costs
from headrace.router.placement.policies import Pick
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Shed, Waiting
from headrace.router.placement.worker_view import Bools, Floats, WorkerView, why_not

EACH = 8  # decisions remembered per request, and requests per client's id
MOST_WORKERS = 64  # of a decision, remembered: of more the cheapest


@dataclass(frozen=True, slots=True)
class DecisionSnapshot:
    names: tuple[str, ...]
    reasons: tuple[str, ...]  # why a worker may not take it
    overlaps: Mapping[str, Overlap]
    uncached: Floats | Sequence[float]
    work: Floats | Sequence[float]
    workers: WorkerView
    ways: tuple[Floats, Bools] | None = None  # where prompts may be computed elsewhere: least costs, and room

    def candidates(self) -> list[Candidate]:
        found = []
        workers = self.workers
        cost = workers.wait_s + np.asarray(self.work) * workers.token_s + workers.step_s
        room = workers.room
        if self.ways is not None:
            cost, room = np.where(np.isfinite(self.ways[0]), self.ways[0], cost), self.ways[1]
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
    id: str
    name: str = ""
    attempt: int = 1
    state: str
    reason: str
    worker: str = ""
    at_s: float
    waited_s: float
    since_arrival_s: float = 0.0
    predicted_ttft_s: float = 0.0
    snapshot: DecisionSnapshot | None = None
    prefill: PrefillDecision | None = None
    fleet: FleetDecision | None = None


class DecisionLog:
    """Keeps the decisions about the last `most` requests, the last few of each: a request that moves is placed again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decisions: OrderedDict[str, tuple[LoggedDecision, ...]] = OrderedDict()
        self._named: dict[str, tuple[str, ...]] = {}  # client's id → ids of its last requests

    def add(self, decision: LoggedDecision) -> None:
        earlier = self._decisions.pop(decision.id, ())
        self._decisions[decision.id] = (*earlier[1 - EACH :], decision)
        if decision.name and not earlier:
            self._named[decision.name] = (*self._named.get(decision.name, ())[1 - EACH :], decision.id)
        while len(self._decisions) > self._most:
            self._forget(*self._decisions.popitem(last=False))

    def _forget(self, request_id: str, decisions: tuple[LoggedDecision, ...]) -> None:
        name = decisions[0].name
        if name in self._named and not (left := tuple(i for i in self._named[name] if i != request_id)):
            del self._named[name]
        elif name in self._named:
            self._named[name] = left

    def placed(self, placement: Placement, snapshot: DecisionSnapshot, now_s: float) -> None:
        request = placement.request
        self.add(
            LoggedDecision(
                id=request.id,
                name=request.name,
                attempt=request.attempt,
                state="placed",
                reason=placement.reason,
                worker=placement.worker,
                at_s=now_s,
                waited_s=placement.waited_s,
                since_arrival_s=request.age_s(now_s),
                predicted_ttft_s=placement.predicted_ttft_s,
                snapshot=snapshot,
                prefill=placement.prefill,
                fleet=placement.fleet,
            )
        )

    def shed(self, shed: Shed, now_s: float) -> None:
        self.add(_undecided(shed.request, now_s, state="refused", reason=shed.code))

    def find(self, wanted: str) -> list[LoggedDecision]:
        ids = {wanted: None} | dict.fromkeys(self._named.get(wanted, ()))
        return sorted((d for i in ids for d in self._decisions.get(i, ())), key=lambda decision: decision.at_s)


def reason_of(row: CostRow, load: WorkerLoad, overlap: Overlap, pick: Pick, window: CostMatrix, policy: str) -> str:
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
    if not overlap.blocks:
        return "load"
    best = max((found.blocks for found in set(row.overlaps.values())), default=0)
    return "prefix" if overlap.blocks >= best else "load"


def take_snapshot(
    row: CostRow, window: CostMatrix, loads: LoadTable, workers: WorkerView, settings: SchedulerSettings
) -> DecisionSnapshot:
    """Keep the present state as seen by this request: of a large pool the cheapest workers."""
    uncached, work, ways = window.uncached[row.number], window.work[row.number], None
    if workers.prefill is not None:
        found = costs(window, np.array([row.number]), workers, 0.0, settings)
        ways = found.cost[0], found.free[0]
    if len(loads.ordered) <= MOST_WORKERS:
        return DecisionSnapshot(
            loads.names, reasons(row.request, loads), row.overlaps, uncached.copy(), work.copy(), workers, ways
        )
    cost = workers.wait_s + work * workers.token_s + workers.step_s if ways is None else ways[0]
    cost = np.where(window.eligible[row.number], cost, np.inf)
    columns = np.argpartition(cost, MOST_WORKERS)[:MOST_WORKERS]
    names = tuple(loads.names[column] for column in columns)
    return DecisionSnapshot(
        names,
        tuple(why_not(row.request, loads.ordered[column]) for column in columns),
        {name: row.overlaps[name] for name in names if name in row.overlaps},
        uncached[columns],
        work[columns],
        workers.part(columns),
        None if ways is None else (ways[0][columns], ways[1][columns]),
    )


def waiting_decision(row: CostRow, snapshot: DecisionSnapshot, now_s: float) -> LoggedDecision:
    return _undecided(row.request, now_s, state="waiting", snapshot=snapshot)


def _undecided(
    request: Waiting, now_s: float, *, state: str, reason: str = "", snapshot: DecisionSnapshot | None = None
) -> LoggedDecision:
    return LoggedDecision(
        id=request.id,
        name=request.name,
        attempt=request.attempt,
        state=state,
        reason=reason,
        at_s=now_s,
        waited_s=request.waited_s(now_s),
        since_arrival_s=request.age_s(now_s),
        snapshot=snapshot,
    )


def reasons(request: Waiting, loads: LoadTable) -> tuple[str, ...]:
    anywhere = not request.worker and not request.require and not request.adapter
    if anywhere and (not loads.least_context or request.longest <= loads.least_context):
        return tuple("draining" if load.info.draining else "" for load in loads.ordered)
    return tuple(why_not(request, load) for load in loads)


def explanation(decisions: Sequence[LoggedDecision], *, router: str, policy: str) -> Explanation:
    """Make the message that explains these decisions, oldest first and at least one; its `at` is on the scheduler's clock."""
    *earlier, last = map(_values, decisions)
    named: dict[str, Any] = {"router": router, "policy": policy}
    return Explanation(**last, **named, earlier=[Decided(**values, **named) for values in earlier])


def _values(decision: LoggedDecision) -> dict[str, Any]:
    return {
        "id": decision.id,
        "name": decision.name,
        "attempt": decision.attempt,
        "state": decision.state,
        "worker": decision.worker,
        "reason": decision.reason,
        "at": decision.at_s,
        "waited_s": round(decision.waited_s, 6),
        "since_arrival_s": round(decision.since_arrival_s, 6),
        "predicted_ttft_s": round(decision.predicted_ttft_s, 6),
        "candidates": decision.snapshot.candidates() if decision.snapshot is not None else [],
        "prefill": decision.prefill,
        "fleet": decision.fleet,
    }
