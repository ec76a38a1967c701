"""Places a request that comes while nothing waits, without a row in the window, a place in the queue or an array.

That is how most requests come while the workers keep up.  The choice, the charge and what is remembered are those that
`Scheduler.offer` and `decide` come to for the same request: `tests/unit/router/placement/test_lone_requests.py` compares the
two.  Whatever is rare (a named worker, a session, a batch request, a suspect, a near deadline) is left to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from headrace.router.index.types import NO_OVERLAP, CacheView, Overlap
from headrace.router.placement.cost import uncached_tokens
from headrace.router.placement.decision_log import DecisionLog, DecisionSnapshot
from headrace.router.placement.disagg_planner import local_plan, make_placement
from headrace.router.placement.load import LoadTable
from headrace.router.placement.room import Room, RouterBackoff
from headrace.router.placement.scalar_choice import ScalarChoice, choose_one
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.turn_queues import TurnQueues
from headrace.router.placement.types import Placement, Waiting
from headrace.router.placement.worker_registry import WorkerRegistry
from headrace.router.placement.worker_view import WorkerView


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
