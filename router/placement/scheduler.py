"""The scheduler of one router: it gives waiting requests to workers. Sans-io: every fact is passed in, with the time.

Late binding: a request is given to a worker when that worker has room (a free slot, KV blocks, and less prefill before it than
a part of one engine step), not before, so that it meets the cache as it then is.  `fairness` says whose turn it is, and
`policies` pairs requests and workers among those.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from math import inf

from headrace.broker.messages.control import Explanation
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.index.types import NO_OVERLAP, CacheView, Overlap
from headrace.router.placement.admission import Admission, unplaceable
from headrace.router.placement.cost import uncached_tokens
from headrace.router.placement.decision_log import (
    DecisionLog,
    DecisionSnapshot,
    explanation,
    reason_of,
    take_snapshot,
    waiting_decision,
)
from headrace.router.placement.disagg_planner import (
    DisaggPlan,
    local_plan,
    make_placement,
    no_prefill_worker,
    verified_overlap,
)
from headrace.router.placement.fleet_grid import FleetGrid
from headrace.router.placement.fleets import FleetChooser
from headrace.router.placement.load import WorkerLoad
from headrace.router.placement.policies import Pick, make_policy, pick_plain, prefer_session
from headrace.router.placement.pool import Pool
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.suspects import WaitingSuspect, on_trial
from headrace.router.placement.types import Decision, Placement, Shed, Waiting, WorkerInfo
from headrace.router.placement.window import Window
from headrace.router.placement.worker_view import WorkerView

_RECHECK_S = 0.05  # while requests wait, at least so often
_SOONEST_S = 0.001
_PAIRS, _LEAST_CANDIDATES = 65_536, 32  # of a request and a worker that are weighed in a decision; requests, in any pool
_PLACED, _LEAST_PLACED = 16_384, 8  # placements of one call, times workers: the event loop has other work, too


class Scheduler:
    """Decides placements over a `Pool` and a `Window`. Times are seconds of one monotonic clock. Not for several threads."""

    def __init__(
        self, settings: SchedulerSettings, view: CacheView, *, name: str = "", seed: int = 0, grid: FleetGrid | None = None
    ) -> None:
        self.settings = settings
        self.name = name
        self.several_tenants = False  # more than one has requests in the queue before the window
        self.pool = Pool(settings, view, name=name)
        self.window = Window(settings, self.pool, view)
        self._view = view
        self._admission = Admission(settings.limits)
        self._fleets = FleetChooser(settings, self.pool, self.window.queue.predicted_output, grid)
        rng = random.Random(f"{name} {seed}")  # noqa: S311 - choices, no secrets
        self._policy = make_policy(settings, rng, self._fleets, self.pool.first_tokens.promises)
        self._log = DecisionLog(settings.explained)
        self._usual = settings.policy == "kv" and settings.temperature <= 0
        self._more = False  # the last call of `decide` has left something

    # Workers, load and events.

    def put_worker(self, info: WorkerInfo, now_s: float) -> None:
        if self.pool.put_worker(info, now_s):
            self.window.columns_changed(now_s)

    def remove_worker(self, worker: str, now_s: float) -> None:
        if self.pool.remove_worker(worker, now_s):
            self.window.columns_changed(now_s)

    def set_routers(self, names: Iterable[str]) -> None:
        self.pool.set_routers(names)

    def on_report(self, report: LoadReport, now_s: float) -> None:
        self.pool.on_report(report, now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        self.pool.on_event(event, now_s)
        if event.kind == "prefilled":
            self.window.queue.correct(event.id, uncached=event.uncached)
            self._fleets.note_begun(event.id)
        elif event.kind == "settled":
            self.window.queue.settle(event.id, output=event.tokens)

    # Requests.

    @property
    def waiting(self) -> int:
        return len(self.window.rows)

    @property
    def suspects_awaiting_lost(self) -> int:
        return self.window.suspects.awaiting_lost

    def offer(self, request: Waiting, now_s: float) -> Shed | None:
        """Take a request into the window, or return its refusal. A request that waits already is left as it is."""
        pool, window = self.pool, self.window
        if request.id in window.rows:
            return None
        request = self._fleets.directed(request)
        uncached = window.add(request, now_s)
        queue = window.queue.interactive
        shed = self._admission.admit(
            request,
            uncached=uncached,
            queue=queue,
            pool=pool.speed(now_s),
            now_s=now_s,
            service_s=uncached / pool.prefill_tokens_per_s,
            crowded=self.several_tenants or queue.backlog.has_others(request.tenant),
        )
        if shed is not None:
            window.drop(request.id)
            self._log.shed(shed, now_s)
            return shed
        window.enqueue(request, tokens=uncached)
        if not request.batch:
            pool.see_interactive(now_s)
        return None

    def assess(self, request_id: str, *, limit: int, crashes: int) -> None:
        """Note what the judge of a request says: suspects of this group limit go to trial workers, others (0) where they like.

        A request that does not wait, or was never thought suspect, is ignored.
        """
        self.window.assess(request_id, limit, crashes)

    def cancel(self, ids: Iterable[str]) -> list[Waiting]:
        return [request for request_id in ids if (request := self.window.cancel(request_id)) is not None]

    def drain(self) -> list[Waiting]:
        return self.cancel([request.id for request in self.window.queue])

    def unplace(self, placement: Placement, now_s: float) -> None:
        """Let a request wait again whose placement did not happen, because the worker's queue is full.

        That worker gets nothing before its next report.
        """
        self.pool.unplace(placement, now_s)
        self.window.put_back(placement, now_s)

    # A request that comes while nothing waits needs no row in the window, no turn and no array. That is how most come while
    # the workers keep up. The choice, the charge and what is remembered are those that `offer` and `decide` come to for it:
    # `tests/unit/router/placement/test_lone_requests.py` compares the two. Whatever is rare (prefill workers, several fleets,
    # a named worker, a session, a batch request, a suspect, a near deadline) is left to them.

    def place_now(self, request: Waiting, now_s: float) -> Placement | None:
        """Place a request that has just come, or return None: then nothing has changed, and it is to be offered."""
        pool = self.pool
        loads = pool.loads
        if self.window.rows or not loads.ordered or loads.many or not self._is_plain(request, now_s):
            return None
        self._view.expire(now_s)
        loads.expire(now_s, after_s=self.settings.entry_expiry_s)
        workers = pool.view(None, now_s)
        if True not in workers.all_room:
            return None
        overlaps = self._view.lookup(request.chain)
        work = self._work(request, overlaps)
        congestion = pool.congestion(len(self.window.interactive) + 1)
        chosen = pick_plain(request, work, workers, congestion, now_s, self.settings)
        if chosen is None or not self._in_time(request, min(work), workers, now_s):
            return None
        load = loads.ordered[chosen.column]
        wait_s = workers.all_wait_s[chosen.column]
        if pool.routers > 1:
            pool.backoff.note_rooms(workers.all_room, loads, now_s)
            if pool.backoff.must_wait(load, max(chosen.cost_s - wait_s, 0.0) / (1.0 + congestion), now_s):
                return None
        overlap = overlaps.get(load.info.worker, NO_OVERLAP)
        plan = local_plan(request, load, overlap, workers, wait_s)
        placement = make_placement(request, load, overlap, plan, _reason(chosen, overlap, overlaps, len(loads)), now_s)
        no_reasons = ("",) * len(loads)
        self._log.placed(placement, DecisionSnapshot(loads.names, no_reasons, overlaps, work, work, workers), now_s)
        self.window.queue.interactive.pass_by(request, uncached=placement.uncached)
        pool.place(placement, load, overlap, plan, overlaps, now_s)
        pool.see_interactive(now_s)
        return placement

    def _is_plain(self, request: Waiting, now_s: float) -> bool:
        pool, loads = self.pool, self.pool.loads
        return (
            self._usual
            and not (pool.disagg.known or pool.first_tokens.promises or pool.first_tokens.tells(request))
            and not (request.worker or request.require or request.adapter or request.session or request.prefer)
            and not (request.suspect or request.batch)
            and len(loads.serving) == len(loads.ordered)
            and (not loads.least_context or request.longest <= loads.least_context)
            and self.window.queue.interactive.is_fresh(request, now_s)
        )

    def _work(self, request: Waiting, overlaps: Mapping[str, Overlap]) -> list[float]:
        most, tiers = max(request.tokens, 1.0), self.settings.tiers
        if not overlaps:
            return [most] * len(self.pool.loads.ordered)
        found = (overlaps.get(name) for name in self.pool.loads.names)
        return [most if overlap is None else uncached_tokens(request, overlap, tiers) for overlap in found]

    def _in_time(self, request: Waiting, uncached: float, workers: WorkerView, now_s: float) -> bool:
        """Return whether admission would surely not call its deadline hopeless: no worker is waited for longer than this."""
        left_s = request.deadline_s - now_s
        if left_s == inf:
            return True
        starts_s = max(workers.all_wait_s) + uncached / self.pool.prefill_tokens_per_s
        return left_s > 0.0 and starts_s <= left_s * self.settings.limits.hopeless_factor

    # Decisions.

    def decide(self, now_s: float) -> list[Decision]:
        """Decide what can be decided now, in a large pool a part of it. Call it after any change, and at `next_wake_s`."""
        pool, window = self.pool, self.window
        self._more = False
        self._view.expire(now_s)
        pool.expire(now_s)
        if not window.rows:
            return []
        window.refresh_some()
        decisions: list[Decision] = [*self._shed_overdue(now_s)]
        if not pool.loads.ordered:
            return decisions
        decisions += self._try_suspects(now_s)
        placements, most = 0, max(_LEAST_PLACED, _PLACED // len(pool.loads.ordered))
        suspects = len(window.suspects)  # those that are left: only the others are placed below
        while len(window.rows) > suspects:
            if placements == most:
                self._more = True
                break
            side = pool.disagg.prefill_side(now_s)
            if not pool.has_room(len(window.interactive), side, now_s):
                if pool.routers > 1:
                    pool.backoff.note_no_room(pool.loads)
                break
            workers = pool.view(side, now_s)
            if pool.routers > 1:
                pool.backoff.note_rooms(workers.all_room, pool.loads, now_s)
            placement = self._place_one(workers, now_s)
            if placement is None:
                break
            decisions.append(placement)
            placements += 1
        return decisions

    def _shed_overdue(self, now_s: float) -> list[Shed]:
        pool, window = self.pool, self.window
        late = [self._admission.late(request, now_s) for request in window.expired(now_s)]
        refused = [unplaceable(*found) for found in window.unplaceable(now_s)] if pool.loads.ordered else []
        if self.settings.prefill_unready == "refuse":
            rows = pool.disagg.refused(window.matrix, pool.disagg.prefill_side(now_s))
            refused += [no_prefill_worker(row.request) for row in rows]
        for shed in refused:
            window.cancel(shed.request.id)
        for shed in (*late, *refused):
            self._log.shed(shed, now_s)
        return late + refused

    def _try_suspects(self, now_s: float) -> list[Placement]:
        placed: list[Placement] = []
        suspects = self.window.suspects
        for suspect in suspects.due(now_s):
            load = suspects.choose(suspect, self.window.eligible(suspect.request.id))
            if load is not None:
                placed.append(self._place_on_trial(suspect, load, now_s))
                suspects.keep(load)
        return placed

    def _place_one(self, interactive: WorkerView, now_s: float) -> Placement | None:
        pool, window, passed_up = self.pool, self.window, False
        waiting = len(window.interactive)
        most = min(self.settings.candidates, max(_LEAST_CANDIDATES, _PAIRS // len(pool.loads.ordered)))
        groups = window.queue.groups(most, now_s)
        window.refresh_candidates(groups)
        for group in groups:
            if group.over_share and passed_up:
                continue  # otherwise a flood would get every worker that others leave for the sake of their caches
            requests, workers = group.requests, interactive
            if group.batch:
                workers = pool.view(interactive.prefill, now_s, alone=pool.alone(waiting, now_s))
            congestion = pool.congestion(waiting, batch=group.batch)
            while (pick := self._policy.pick(requests, window.matrix, workers, congestion, now_s)) is not None:
                load = pool.loads.ordered[pick.column]
                service_s = max(pick.cost_s - workers.all_wait_s[pick.column], 0.0) / (1.0 + congestion)
                # A remote prompt takes room in the prefill queue, not on this worker.
                if pick.remote or not pool.backoff.must_wait(load, service_s, now_s):
                    return self._place(requests[pick.at], pick, workers, congestion, now_s, kept=group.kept)
                workers.close(pick.column)
            passed_up = self._policy.passed_up
        return None

    def _place(
        self, request: Waiting, pick: Pick, workers: WorkerView, congestion: float, now_s: float, *, kept: bool = False
    ) -> Placement:
        pool, matrix, row = self.pool, self.window.matrix, self.window.rows[request.id]
        column, remote = prefer_session(row, pick, matrix, workers, self.settings)
        load = pool.loads.ordered[column]
        overlap = verified_overlap(self._view, load, request)
        local = local_plan(request, load, overlap, workers, workers.all_wait_s[column])
        plan = pool.disagg.plan(row, load, matrix, workers, local=local, remote=remote, congestion=congestion)
        reason = reason_of(row, load, overlap, pick, matrix, self.settings.policy)
        foreseen = pool.first_tokens.foresee(request, load, plan, overlap, now_s)
        placement = self._fleets.explained(make_placement(request, load, overlap, foreseen, reason, now_s, kept=kept), load)
        self._carry_out(placement, load, overlap, plan, workers, now_s)
        return placement

    def _place_on_trial(self, suspect: WaitingSuspect, load: WorkerLoad, now_s: float) -> Placement:
        request = suspect.request
        workers = self.pool.view(None, now_s)
        overlap = verified_overlap(self._view, load, request)
        wait_s = load.pending_tokens(now_s) / load.speed.prefill_tokens_per_s
        plan = local_plan(request, load, overlap, workers, wait_s, decision="trial" if self.pool.disagg.known else "")
        placement = self._fleets.on_trial(on_trial(make_placement(request, load, overlap, plan, "trial", now_s), suspect), load)
        self._carry_out(placement, load, overlap, plan, workers, now_s)
        return placement

    def _carry_out(
        self, placement: Placement, load: WorkerLoad, overlap: Overlap, plan: DisaggPlan, workers: WorkerView, now_s: float
    ) -> None:
        pool, window, request = self.pool, self.window, placement.request
        row = window.rows[request.id]
        self._log.placed(placement, take_snapshot(row, window.matrix, pool.loads, workers, self.settings), now_s)
        window.take(request.id, uncached=placement.uncached)
        pool.place(placement, load, overlap, plan, row.overlaps, now_s)

    def next_wake_s(self, now_s: float) -> float | None:
        """Return when to decide again if nothing happens before; None = not needed."""
        window = self.window
        if not window.rows:
            return None
        if self._more:
            return now_s + _SOONEST_S
        wake_s = min(window.queue.next_deadline_s(), now_s + _RECHECK_S)
        wake_s = min(wake_s, self.pool.next_wake_s(len(window.interactive), now_s))
        return max(wake_s, now_s + _SOONEST_S)

    def queued_prefill_tokens(self, now_s: float) -> float:
        return self.pool.disagg.pool.queued_tokens(now_s)

    # Explanations.

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """Explain the decisions about a request, by its id or its client's, and its state if it waits now.

        Times `at` are on this scheduler's clock.
        """
        pool, window = self.pool, self.window
        found = self._log.find(request_id)
        rows = [row for row in window.rows.values() if request_id in (row.request.id, row.request.name)]
        if rows:
            window.refresh([row.request.id for row in rows])
            workers = pool.view(pool.disagg.prefill_side(now_s), now_s)
        for row in rows:
            snapshot = take_snapshot(row, window.matrix, pool.loads, workers, self.settings)
            found.append(waiting_decision(row, snapshot, now_s))
        return explanation(found, router=self.name, policy=self.settings.policy) if found else None


def _reason(chosen: Pick, overlap: Overlap, overlaps: Mapping[str, Overlap], workers: int) -> str:
    if workers == 1:
        return "only"
    if chosen.aged:
        return "aged"
    if not overlap.blocks:
        return "load"
    best = max(found.blocks for found in overlaps.values())
    return "prefix" if overlap.blocks >= best else "load"
