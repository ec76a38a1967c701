"""The disaggregation planner: it keeps the prefill workers and their jobs, and decides for each placement where its prompt is
computed, with the reason (`transfer.py` has the arithmetic).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.broker.codec import unpack_u64
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.broker.messages.requests import PrefillDecision
from headrace.router.index.types import NO_OVERLAP, CacheView, Overlap
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.cost import CostMatrix, CostRow
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.pair_costs import needs_one
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import (
    ANY,
    Computing,
    PrefillPool,
    PrefillView,
    TransferTimes,
    burden_s,
    computing,
    for_batch,
    local_decision,
    make_prefill_side,
    remote_decision,
)
from headrace.router.placement.types import Placement, Shed, Waiting, WorkerInfo
from headrace.router.placement.worker_view import Floats, Ints, WorkerView

_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class DisaggPlan:
    """The plan for the prompt of one placement. `decision` is None in a pool without prefill workers."""

    decision: PrefillDecision | None
    wait_s: float  # predicted, until the prompt begins to be computed
    service_s: float  # predicted, from then on to the first token
    tokens: float = 0.0  # computed by the prefill worker

    @property
    def remote(self) -> bool:
        return self.decision is not None and self.decision.remote


class DisaggPlanner:
    def __init__(self, settings: SchedulerSettings, loads: LoadTable, view: CacheView) -> None:
        self._settings = settings
        self._loads = loads
        self._view = view
        self.pool = PrefillPool(settings.entry_expiry_s)
        self.times = TransferTimes(fixed_s=settings.handover_s, per_token_s=settings.handover_token_s)
        self.known = False  # there is a prefill side, or there was one: placements say where prompts are computed

    # Workers and their reports.

    def put_worker(self, info: WorkerInfo, speed: SpeedEstimate) -> bool:
        prefills = info.role == "prefill"
        self.known = self.known or prefills or info.takes_handovers
        return prefills and self.pool.put(info, speed)

    def remove_worker(self, worker: str) -> None:
        self.times.remove(worker)

    def on_report(self, report: LoadReport, speed: SpeedEstimate, now_s: float) -> None:
        if self.pool.get(report.worker) is not None:
            self.pool.on_report(report, speed, now_s)
        elif report.handover_s:
            self.times.observe(report)

    def placed_elsewhere(self, event: JobEvent, now_s: float) -> None:
        load = self._loads.get(event.worker)
        self.pool.place(
            event.id,
            decode=event.worker,
            handover=load.info.handover if load is not None else "",
            tokens=event.uncached or event.tokens,
            blocks=event.blocks,
            now_s=now_s,
            worker="" if event.prefill == ANY else event.prefill,
        )
        if load is not None and event.hashes:
            self._predict(load.info.handover, "" if event.prefill == ANY else event.prefill, unpack_u64(event.hashes), now_s)

    # Decisions.

    def prefill_side(self, now_s: float) -> PrefillView | None:
        """Describe the prefill workers as they are now; None: every prompt is computed where it is answered."""
        if not self.known:
            return None
        return make_prefill_side(self._loads, self.pool, self.times, self._settings, now_s)

    def for_batch(self, side: PrefillView, *, alone: bool) -> PrefillView:
        """Describe the same as batch requests see it, which get only what interactive ones leave. `alone`: there are none."""
        return for_batch(side, self._loads, self._settings, alone=alone)

    def plan(
        self,
        row: CostRow,
        load: WorkerLoad,
        window: CostMatrix,
        workers: WorkerView,
        *,
        local: DisaggPlan,
        remote: bool,
        congestion: float,
    ) -> DisaggPlan:
        if not self.known:
            return local
        side = workers.prefill
        if side is not None:
            for group in side.groups:
                if load.column in group.decode:
                    tokens = window.remote[[row.number]][:, group.prefill]
                    uncached = float(window.uncached[row.number, load.column])
                    found = computing(tokens, np.array([uncached]), side, group, congestion)
                    if remote:
                        if row.request.prefill_fleet and found.who[0] < 0:
                            found = replace(found, who=np.array([self._soonest(tokens[0], group.prefill)]))
                        near = group.far_s is not None and bool(found.tokens[0] >= tokens[np.isfinite(tokens)].max())
                        return self._remote(found, side, uncached, named_for="near" if near else "prefix_there")
                    return self._local(self._why_local(row.request, load, side, found, uncached, local), local)
        return self._local(self._why_never(load), local)

    def _soonest(self, tokens: Floats, columns: Ints) -> int:
        """Return the column of the prefill worker that is free first of those that may compute a prompt; -1 without one."""
        able = [int(column) for column, found in zip(columns, tokens, strict=True) if np.isfinite(found)]
        return min(able, key=lambda column: self.pool.ordered[column].free_s, default=-1)

    def _remote(self, found: Computing, side: PrefillView, uncached: float, *, named_for: str) -> DisaggPlan:
        column, wait_s = int(found.who[0]), float(found.wait_s[0])
        reason = "always" if self._settings.prefill == "always" else named_for if column >= 0 else "pays"
        worker = side.names[column] if column >= 0 else ""
        decision = remote_decision(reason, worker=worker, wait_s=wait_s, settings=self._settings)
        service_s = float(found.service_s[0]) + side.way_s + side.fetch_s * uncached
        return DisaggPlan(decision, wait_s, service_s, float(found.tokens[0]))

    @staticmethod
    def _local(reason: str, local: DisaggPlan) -> DisaggPlan:
        return DisaggPlan(local_decision(reason), local.wait_s, local.service_s)

    def _why_local(
        self,
        request: Waiting,
        load: WorkerLoad,
        side: PrefillView,
        found: Computing,
        uncached: float,
        local: DisaggPlan,
    ) -> str:
        least = self._settings.prefill_min_tokens
        if uncached < least:
            return "cached" if request.tokens >= least else "short"
        service_s = float(found.service_s[0])
        if not np.isfinite(service_s):
            return "no_prefill_worker"  # none that can compute this one
        away_s = service_s + side.way_s + side.fetch_s * uncached
        burden = burden_s(np.array([uncached]), side, np.array([load.column]))
        here_s = local.wait_s + local.service_s + float(burden[0])
        return "queue" if away_s < here_s else "cheaper"

    def _why_never(self, load: WorkerLoad) -> str:
        if self._settings.prefill == "never":
            return "never"
        return "no_prefill_worker" if load.info.takes_handovers else "aggregated"

    def place(
        self, request: Waiting, load: WorkerLoad, plan: DisaggPlan, overlaps: Mapping[str, Overlap], now_s: float
    ) -> None:
        decision = plan.decision
        if decision is None or not decision.remote:
            return
        name, handover = load.info.worker, load.info.handover
        self.pool.place(
            request.id,
            decode=name,
            handover=handover,
            tokens=plan.tokens,
            blocks=len(request.chain) - overlaps.get(name, NO_OVERLAP).blocks,
            now_s=now_s,
            worker=decision.worker,
        )
        self._predict(handover, decision.worker, request.chain, now_s)

    def _predict(self, handover: str, worker: str, blocks: Sequence[int], now_s: float) -> None:
        """Predict these blocks on the prefill worker that has the job, if that is known: siblings had better go there too."""
        able = [one for one in self.pool if one.ready and one.info.handover == handover]
        if worker:
            self._view.predict(worker, blocks, now_s=now_s)
        elif len(able) == 1:
            self._view.predict(able[0].info.worker, blocks, now_s=now_s)

    def refused(self, window: CostMatrix, side: PrefillView | None) -> list[CostRow]:
        """List requests that no worker may take without a prefill worker, where the settings say to refuse those."""
        if side is None or self._settings.prefill_unready != "refuse" or not side.bare.any() or not len(window):
            return []
        rows = list(window.rows.values())
        numbers = np.array([row.number for row in rows], dtype=np.intp)
        eligible = window.eligible[numbers]
        bare = eligible & side.bare & needs_one(window.uncached[numbers], self._settings)
        return [rows[n] for n in np.flatnonzero(eligible.any(axis=1) & (bare == eligible).all(axis=1))]

    def next_wake_s(self, now_s: float) -> float:
        """Predict when the next prefill worker will have room; infinite without any."""
        times = [one.free_s - self._settings.prefill_lookahead_s for one in self.pool if one.ready]
        return min((at for at in times if at > now_s), default=float("inf"))

    def speed(self) -> float:
        if self._settings.prefill == "never":
            return 0.0
        return sum(one.speed.prefill_tokens_per_s for one in self.pool if one.ready)


def no_prefill_worker(request: Waiting) -> Shed:
    message = "no prefill worker is ready, and decode workers are not to compute prompts (prefill_unready)"
    return Shed(request=request, code="no_prefill_worker", message=message, retry_after_s=_RETRY_S)


def announced(placement: Placement) -> str:
    """Name the prefill worker for the `placed` event: `*` for any of them, empty for the worker itself."""
    decision = placement.prefill
    return "" if decision is None or not decision.remote else decision.worker or ANY


def uncached_tokens(request: Waiting, overlap: Overlap) -> int:
    return max(request.tokens - overlap.blocks * request.block_size, 1)


def verified_overlap(view: CacheView, load: WorkerLoad, request: Waiting) -> Overlap:
    """Return what the worker's cache has of a request's prompt, with every block compared."""
    chain = request.chain
    return load.info.whole(view.verify(load.info.worker, chain)) if len(chain) else NO_OVERLAP


def local_plan(
    request: Waiting, load: WorkerLoad, overlap: Overlap, workers: WorkerView, wait_s: float, *, decision: str = ""
) -> DisaggPlan:
    """Plan that the worker computes the prompt itself. `decision`: the reason to say, in a pool with prefill workers."""
    service_s = uncached_tokens(request, overlap) * workers.all_token_s[load.column] + workers.all_step_s[load.column]
    return DisaggPlan(local_decision(decision) if decision else None, wait_s, service_s)


def make_placement(
    request: Waiting, load: WorkerLoad, overlap: Overlap, plan: DisaggPlan, reason: str, now_s: float, *, kept: bool = False
) -> Placement:
    return Placement(
        request=request,
        worker=load.info.worker,
        uncached=uncached_tokens(request, overlap),
        new_blocks=request.chain[overlap.device :],
        predicted_ttft_s=request.age_s(now_s) + plan.wait_s + plan.service_s,
        waited_s=request.waited_s(now_s),
        reason=reason,
        prefill=plan.decision,
        kept=kept,
    )
