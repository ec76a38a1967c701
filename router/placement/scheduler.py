"""The scheduler of one router: it gives waiting requests to workers. Sans-io: every fact is passed in, with the time.

Late binding: a request is given to a worker when that worker has room (a free slot, KV blocks, and less prefill before it than
a part of one engine step), not before, so that it meets the cache as it then is.  `fairness` says whose turn it is, and
`policies` pairs requests and workers among those.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from headrace.broker.codec import unpack_u64
from headrace.broker.messages.control import Explanation
from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.index.types import NO_OVERLAP, CacheView, Overlap
from headrace.router.placement.admission import Admission, OverdueRequests, Unplaceable
from headrace.router.placement.cost import CostMatrix, has_room, uncached_tokens
from headrace.router.placement.decision_log import (
    DecisionLog,
    DecisionSnapshot,
    explanation,
    reason_of,
    take_snapshot,
    waiting_decision,
)
from headrace.router.placement.disagg_planner import DisaggPlan, DisaggPlanner, local_plan, make_placement, verified_overlap
from headrace.router.placement.first_tokens import FirstTokens
from headrace.router.placement.fleet_grid import FleetGrid
from headrace.router.placement.fleets import FleetChooser
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.policies import Pick, make_policy, prefer_session
from headrace.router.placement.room import InteractivePresence, Room, RouterBackoff, WindowRefresh, least_uncached
from headrace.router.placement.scalar_choice import ScalarChoice, choose_one
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.suspects import Suspects, WaitingSuspect, on_trial
from headrace.router.placement.transfer import PrefillView
from headrace.router.placement.turn_queues import TurnQueues
from headrace.router.placement.types import Decision, Placement, Shed, Waiting, WorkerInfo
from headrace.router.placement.worker_registry import WorkerRegistry
from headrace.router.placement.worker_view import WorkerView

# Places a request that comes while nothing waits, without a row in the window, a place in the queue or an array.
#
# That is how most requests come while the workers keep up. The choice, the charge and what is remembered are those that
# `Scheduler.offer` and `decide` come to for the same request: `tests/unit/router/placement/test_lone_requests.py` compares
# the two. Whatever is rare (a named worker, a session, a batch request, a suspect, a near deadline) is left to them.


class LoneRequests:
    """Places the requests of one router that find nothing waiting. For small pools without prefill workers or fleets."""

    def __init__(
        self,
        settings: SchedulerSettings,
        view: CacheView,
        loads: LoadTable,
        queue: TurnQueues,
        workers: WorkerRegistry,
        room: Room,
        log: DecisionLog,
    ) -> None:
        self._settings = settings
        self._view = view
        self._loads = loads
        self._queue = queue
        self._workers = workers
        self._room = room
        self._log = log
        self._usual = settings.policy == "kv" and settings.temperature <= 0

    def place(self, request: Waiting, routers: tuple[str, ...], backoff: RouterBackoff, now_s: float) -> Placement | None:
        """Place a request now, or return None, and nothing has changed: it takes the way of the others."""
        loads = self._loads
        if not loads.ordered or loads.many or not self._is_plain(request, now_s):
            return None
        self._view.expire(now_s)
        loads.expire(now_s, after_s=self._settings.entry_expiry_s)
        workers = self._room.view(None, now_s)
        if True not in workers.all_room:
            return None
        overlaps = self._view.lookup(request.chain)
        work = self._work(request, overlaps)
        congestion = self._room.congestion(len(routers), batch=False, coming=1)
        chosen = choose_one(request, work, workers, congestion, now_s, self._settings)
        if chosen.at < 0 or not self._in_time(request, min(work), workers, now_s):
            return None
        if len(routers) > 1:
            backoff.note_rooms(workers.all_room, loads, now_s)
            service_s = max(chosen.cost_s - workers.all_wait_s[chosen.column], 0.0) / (1.0 + congestion)
            if backoff.must_wait(loads.ordered[chosen.column], routers, service_s, now_s):
                return None
        return self._carry_out(request, chosen, overlaps, work, workers, now_s)

    def _is_plain(self, request: Waiting, now_s: float) -> bool:
        loads = self._loads
        return (
            self._usual
            and not (request.worker or request.require or request.adapter or request.session or request.prefer)
            and not (request.suspect or request.batch)
            and len(loads.serving) == len(loads.ordered)
            and (not loads.least_context or request.longest <= loads.least_context)
            and self._queue.interactive.is_fresh(request, now_s)
        )

    def _work(self, request: Waiting, overlaps: Mapping[str, Overlap]) -> list[float]:
        most, tiers = max(request.tokens, 1.0), self._settings.tiers
        if not overlaps:
            return [most] * len(self._loads.ordered)
        found = (overlaps.get(name) for name in self._loads.names)
        return [most if overlap is None else uncached_tokens(request, overlap, tiers) for overlap in found]

    def _in_time(self, request: Waiting, uncached: float, workers: WorkerView, now_s: float) -> bool:
        """Return whether admission would surely not call its deadline hopeless: no worker is waited for longer than this."""
        left_s, limits = request.deadline_s - now_s, self._settings.limits
        if left_s == inf:
            return True
        starts_s = max(workers.all_wait_s) + uncached / self._workers.prefill_tokens_per_s
        return left_s > 0.0 and starts_s <= left_s * limits.hopeless_factor

    def _carry_out(
        self,
        request: Waiting,
        chosen: ScalarChoice,
        overlaps: Mapping[str, Overlap],
        work: list[float],
        workers: WorkerView,
        now_s: float,
    ) -> Placement:
        loads = self._loads
        load = loads.ordered[chosen.column]
        worker = load.info.worker
        overlap = overlaps.get(worker, NO_OVERLAP)
        plan = local_plan(request, load, overlap, workers, workers.all_wait_s[chosen.column])
        reason = _reason(chosen, overlap, overlaps, len(loads))
        placement = make_placement(request, load, overlap, plan, reason, now_s)
        nobody = ("",) * len(loads)  # lacks anything
        self._log.placed(placement, DecisionSnapshot(loads.names, nobody, overlaps, work, work, workers), now_s)
        self._queue.interactive.pass_by(request, uncached=placement.uncached)
        load.place(request.id, tokens=placement.uncached, blocks=len(request.chain) - overlap.blocks, now_s=now_s)
        self._workers.recent.add(worker, placement.uncached)
        self._view.predict(worker, placement.new_blocks if load.info.kv_events else request.chain, now_s=now_s)
        return placement


def _reason(chosen: ScalarChoice, overlap: Overlap, overlaps: Mapping[str, Overlap], workers: int) -> str:
    if workers == 1:
        return "only"
    if chosen.aged:
        return "aged"
    if not overlap.blocks:
        return "load"
    best = max(found.blocks for found in overlaps.values())
    return "prefix" if overlap.blocks >= best else "load"


_RECHECK_S = 0.05  # while requests wait, at least so often
_SOONEST_S = 0.001
_PAIRS, _LEAST_CANDIDATES = 65_536, 32  # of a request and a worker that are weighed in a decision; requests, in any pool
_PLACED, _LEAST_PLACED = 16_384, 8  # placements of one call, times workers: the event loop has other work, too


class Scheduler:
    """Decides placements. Times are seconds of one monotonic clock. Not for several threads."""

    def __init__(
        self, settings: SchedulerSettings, view: CacheView, *, name: str = "", seed: int = 0, grid: FleetGrid | None = None
    ) -> None:
        self.settings = settings
        self.name = name
        self.routers: tuple[str, ...] = (name,)  # of this pool, this one included: all share what waits
        self.several_tenants = False  # more than one has requests in the queue before the window
        self._view = view
        self._rng = random.Random(f"{name} {seed}")  # noqa: S311 - choices, no secrets
        self._loads = LoadTable()
        self._queue = TurnQueues(settings.fairness)
        self._admission = Admission(settings.limits)
        self.disagg = DisaggPlanner(settings, self._loads, view)
        self._window = CostMatrix(self._loads, self.disagg.pool, settings.tiers)
        self._refresh = WindowRefresh(view, self._window, self._queue)
        self._unplaceable = Unplaceable(self._window, self._loads, patience_s=settings.no_worker_s)
        self._overdue = OverdueRequests(
            settings, self._loads, self._window, self._queue, self._admission, self._unplaceable, self.disagg
        )
        self._suspects = Suspects(self._loads, self._window, self._queue)
        self._workers = WorkerRegistry(settings, self._loads, self.disagg, self._suspects.lost)
        self._presence = InteractivePresence(settings.batch_quiet_s)
        self._room = Room(settings, self._loads, self._workers, self._queue, self._presence, self.disagg)
        self._fleets = FleetChooser(settings, self._loads, self._queue.predicted_output, grid)
        self._first_tokens = FirstTokens(self._loads, settings)
        self._policy = make_policy(settings, self._rng, self._fleets, self._first_tokens.promises)
        self._log = DecisionLog(settings.explained)
        self._backoff = RouterBackoff(name, settings.turn_s)
        self._lone = LoneRequests(settings, view, self._loads, self._queue, self._workers, self._room, self._log)
        self._more = False  # the last call of `decide` has left something

    # Workers.

    def put_worker(self, info: WorkerInfo, now_s: float) -> None:
        self._columns_changed(now_s, self._workers.put(info, now_s))

    def remove_worker(self, worker: str, now_s: float) -> None:
        """Remove a worker. An unknown one is ignored. The movers take care of requests on their way there."""
        self._first_tokens.remove_worker(worker)
        self._columns_changed(now_s, self._workers.remove(worker, now_s))

    def set_routers(self, names: Iterable[str]) -> None:
        """Set the live routers of this pool; this one is always counted."""
        self.routers = tuple(sorted({*names, self.name}))
        self._fleets.routers = len(self.routers)
        if len(self.routers) == 1:
            self._backoff.note_no_room(self._loads)

    def workers(self) -> Sequence[WorkerLoad]:
        return self._loads.ordered

    def _columns_changed(self, now_s: float, changed: bool) -> None:
        if changed:
            self._window.columns_changed(now_s)
            self._unplaceable.recheck()

    # Load.

    def on_report(self, report: LoadReport, now_s: float) -> None:
        """Learn from a load report. That of an unknown worker is ignored: its lease comes first."""
        load = self._workers.on_report(report, now_s)
        if load is not None:
            self._presence.on_report(report, now_s)
            self._note_room(load, now_s)

    def _note_room(self, load: WorkerLoad, now_s: float) -> None:
        if len(self.routers) > 1:  # a single router takes no turns
            self._backoff.note_room(load, room=has_room(load, self.settings, now_s), now_s=now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        if event.kind == "placed":
            if event.by != self.name:
                self._placed_elsewhere(event, now_s)
            return
        self._workers.on_event(event, now_s)
        self._first_tokens.on_event(event, now_s)
        if event.kind == "prefilled":
            self._queue.correct(event.id, uncached=event.uncached)
            self._fleets.note_begun(event.id)
        elif event.kind == "settled":
            self._queue.settle(event.id, output=event.tokens)

    def _placed_elsewhere(self, event: JobEvent, now_s: float) -> None:
        self._first_tokens.placed_elsewhere(event, now_s)
        load = self._workers.placed_elsewhere(event, now_s)
        if load is None:
            return
        self._note_room(load, now_s)
        if event.hashes and not (event.prefill and load.info.kv_events):
            self._view.predict(event.worker, unpack_u64(event.hashes), now_s=now_s)

    # Requests.

    @property
    def waiting(self) -> int:
        return len(self._window.rows)

    @property
    def suspects_awaiting_lost(self) -> int:
        return self._suspects.awaiting_lost if len(self._loads) else 0

    def offer(self, request: Waiting, now_s: float) -> Shed | None:
        """Take a request into the window, or return its refusal. A request that waits already is left as it is."""
        if request.id in self._window.rows:
            return None
        request = self._fleets.directed(request)
        self._view.track(request.id, request.chain)
        overlaps = self._view.overlaps(request.id)
        row = self._window.add(request, overlaps, now_s)
        uncached = least_uncached(row, self._window)
        shed = self._admission.admit(
            request,
            uncached=uncached,
            queue=self._queue.interactive,
            pool=self._workers.pool_speed(len(self.routers), now_s),
            now_s=now_s,
            service_s=uncached / self._workers.prefill_tokens_per_s,
            crowded=self.several_tenants or self._queue.interactive.backlog.has_others(request.tenant),
        )
        if shed is not None:
            self._drop_request(request.id)
            self._log.shed(shed, now_s)
            return shed
        self._queue.add(request, tokens=uncached)
        if not request.batch:
            self._presence.see(now_s)
        self._suspects.hold(request)
        self._unplaceable.check(row)
        return None

    def assess(self, request_id: str, *, limit: int, crashes: int) -> None:
        """Note what the judge of a request says: suspects of this group limit go to trial workers, others (0) where they like.

        A request that does not wait, or was never thought suspect, is ignored.
        """
        self._suspects.assess(request_id, limit, crashes)

    def cancel(self, ids: Iterable[str]) -> list[Waiting]:
        dropped = []
        for request_id in ids:
            request = self._queue.remove(request_id)
            if request is not None:
                self._drop_request(request_id)
                dropped.append(request)
        return dropped

    def drain(self) -> list[Waiting]:
        return self.cancel([request.id for request in self._queue])

    def unplace(self, placement: Placement, now_s: float) -> None:
        """Let a request wait again whose placement did not happen, because the worker's queue is full.

        That worker gets nothing before its next report.
        """
        request = placement.request
        load = self._loads.get(placement.worker)
        if load is not None:
            load.remove_entry(request.id)
            load.full_s = now_s
            load.described = False
        self.disagg.pool.close(request.id, now_s)
        self._view.track(request.id, request.chain)
        row = self._window.add(request, self._view.overlaps(request.id), now_s)
        self._queue.unplace(request, tokens=least_uncached(row, self._window))
        self._suspects.unplace(placement)

    def _drop_request(self, request_id: str) -> None:
        self._window.remove(request_id)
        self._view.untrack(request_id)
        self._unplaceable.remove(request_id)
        self._suspects.remove(request_id)

    # Decisions.

    def place_now(self, request: Waiting, now_s: float) -> Placement | None:
        """Place a request that has just come, or return None, and it is to be offered. For what finds nothing waiting."""
        if self._window.rows or self.disagg.known or self._first_tokens.promises or self._first_tokens.tells(request):
            return None
        placement = self._lone.place(request, self.routers, self._backoff, now_s)
        if placement is not None:
            self._presence.see(now_s)
        return placement

    def decide(self, now_s: float) -> list[Decision]:
        """Decide what can be decided now, in a large pool a part of it. Call it after any change, and at `next_wake_s`."""
        self._more = False
        self._view.expire(now_s)
        self._loads.expire(now_s, after_s=self.settings.entry_expiry_s)
        if self.disagg.pool.jobs:
            self.disagg.pool.expire(now_s)
        if not self._window.rows:
            return []
        self._refresh.some()
        decisions: list[Decision] = [*self._shed_overdue(now_s)]
        if not self._loads.ordered:
            return decisions
        decisions += self._suspects.place(lambda suspect, load: self._place_on_trial(suspect, load, now_s), now_s)
        placements, most = 0, max(_LEAST_PLACED, _PLACED // len(self._loads.ordered))
        suspects = len(self._suspects)  # those that are left: only the others are placed below
        while len(self._window.rows) > suspects:
            if placements == most:
                self._more = True
                break
            side = self.disagg.prefill_side(now_s)
            if not self._any_room(side, now_s):
                break
            workers = self._room.view(side, now_s)
            if len(self.routers) > 1:
                self._backoff.note_rooms(workers.all_room, self._loads, now_s)
            placement = self._place_one(workers, now_s)
            if placement is None:
                break
            decisions.append(placement)
            placements += 1
        return decisions

    def _any_room(self, side: PrefillView | None, now_s: float) -> bool:
        if self._room.any(now_s):
            return True
        if side is not None and side.room.any() and side.takes.any():
            return True
        if len(self.routers) > 1:
            self._backoff.note_no_room(self._loads)
        return False

    def _place_one(self, workers: WorkerView, now_s: float) -> Placement | None:
        passed_up = False
        interactive = workers
        most = min(self.settings.candidates, max(_LEAST_CANDIDATES, _PAIRS // len(self._loads.ordered)))
        groups = self._queue.groups(most, now_s)
        self._refresh.candidates(groups)
        for group in groups:
            if group.over_share and passed_up:
                continue  # otherwise a flood would get every worker that others leave for the sake of their caches
            requests = group.requests
            workers = self._room.view(interactive.prefill, now_s, batch=True) if group.batch else interactive
            congestion = self._room.congestion(len(self.routers), batch=group.batch)
            while (pick := self._policy.pick(requests, self._window, workers, congestion, now_s)) is not None:
                load = self._loads.ordered[pick.column]
                if pick.remote:  # it takes room in the prefill queue, not on this worker
                    return self._place(requests[pick.at], pick, workers, congestion, now_s, kept=group.kept)
                service_s = max(pick.cost_s - workers.all_wait_s[pick.column], 0.0) / (1.0 + congestion)
                if not self._backoff.must_wait(load, self.routers, service_s, now_s):
                    return self._place(requests[pick.at], pick, workers, congestion, now_s, kept=group.kept)
                workers.close(pick.column)
            passed_up = self._policy.passed_up
        return None

    def _place(
        self, request: Waiting, pick: Pick, workers: WorkerView, congestion: float, now_s: float, *, kept: bool = False
    ) -> Placement:
        row = self._window.rows[request.id]
        column, remote = prefer_session(row, pick, self._window, workers, self.settings)
        load = self._loads.ordered[column]
        overlap = verified_overlap(self._view, load, request)
        local = local_plan(request, load, overlap, workers, workers.all_wait_s[column])
        plan = self.disagg.plan(row, load, self._window, workers, local=local, remote=remote, congestion=congestion)
        reason = reason_of(row, load, overlap, pick, self._window, self.settings.policy)
        foreseen = self._first_tokens.foresee(request, load, plan, overlap, now_s)
        placement = self._fleets.explained(make_placement(request, load, overlap, foreseen, reason, now_s, kept=kept), load)
        self._carry_out(placement, load, overlap, plan, workers, now_s)
        return placement

    def _place_on_trial(self, suspect: WaitingSuspect, load: WorkerLoad, now_s: float) -> Placement:
        request = suspect.request
        workers = self._room.view(None, now_s)
        overlap = verified_overlap(self._view, load, request)
        wait_s = load.pending_tokens(now_s) / load.speed.prefill_tokens_per_s
        plan = local_plan(request, load, overlap, workers, wait_s, decision="trial" if self.disagg.known else "")
        placement = self._fleets.on_trial(on_trial(make_placement(request, load, overlap, plan, "trial", now_s), suspect), load)
        self._carry_out(placement, load, overlap, plan, workers, now_s)
        return placement

    def _carry_out(
        self, placement: Placement, load: WorkerLoad, overlap: Overlap, plan: DisaggPlan, workers: WorkerView, now_s: float
    ) -> None:
        request, worker = placement.request, placement.worker
        yields = request.batch and not placement.kept
        row = self._window.rows[request.id]
        self._log.placed(placement, take_snapshot(row, self._window, self._loads, workers, self.settings), now_s)
        self._queue.place(request.id, uncached=placement.uncached)
        self._drop_request(request.id)
        if plan.remote:
            load.place(request.id, tokens=0, blocks=0, now_s=now_s, yields=yields)
            self.disagg.place(request, load, plan, row.overlaps, now_s)
        else:
            blocks = len(request.chain) - overlap.blocks
            load.place(request.id, tokens=placement.uncached, blocks=blocks, now_s=now_s, limit=placement.limit, yields=yields)
        self._workers.recent.add(worker, placement.uncached)
        # A worker without events is known by what was placed on it, so its cached blocks are refreshed as well. Blocks that are
        # computed elsewhere are not there before they are fetched, and then an event says so.
        if not (plan.remote and load.info.kv_events):
            blocks_held = placement.new_blocks if load.info.kv_events else request.chain
            self._view.predict(worker, blocks_held, now_s=now_s)

    def _shed_overdue(self, now_s: float) -> list[Shed]:
        decisions = self._overdue.shed(now_s, self._drop_request)
        for shed in decisions:
            self._log.shed(shed, now_s)
        return decisions

    def next_wake_s(self, now_s: float) -> float | None:
        """Return when to decide again if nothing happens before; None = not needed."""
        if not self._window.rows:
            return None
        if self._more:
            return now_s + _SOONEST_S
        wake_s = min(self._queue.next_deadline_s(), now_s + _RECHECK_S, self._backoff.next_s)
        wake_s = min(wake_s, self._room.next_s(now_s), self._first_tokens.promises.next_s(now_s))
        if len(self.disagg.pool):
            wake_s = min(wake_s, self.disagg.next_wake_s(now_s))
        return max(wake_s, now_s + _SOONEST_S)

    def queued_prefill_tokens(self, now_s: float) -> float:
        return self.disagg.pool.queued_tokens(now_s)

    # Explanations.

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """Explain the decisions about a request, by its id or its client's, and its state if it waits now.

        Times `at` are on this scheduler's clock.
        """
        found = self._log.find(request_id)
        rows = [row for row in self._window.rows.values() if request_id in (row.request.id, row.request.name)]
        if rows:
            self._refresh.requests([row.request.id for row in rows])
            workers = self._room.view(self.disagg.prefill_side(now_s), now_s)
        for row in rows:
            snapshot = take_snapshot(row, self._window, self._loads, workers, self.settings)
            found.append(waiting_decision(row, snapshot, now_s))
        return explanation(found, router=self.name, policy=self.settings.policy) if found else None
