"""A router in one pool: it pulls requests, asks the scheduler, and carries out its decisions.

A request goes one way through the parts, each of which is constructed before the one that hands on to it:

    Intake ──> RequestWindow, scheduler ──> Dispatcher ──> Placer ──> PlacementOutcomes ──> RequestRelease ──> RequestCredit
      │                                         │                           │                    ^
      └────────────────────────────────────> Refuser <──────────────────────┘                    │
                                                └────────────────────────────────────────────────┘

A router works under its lease only.  Workers stop placing on themselves while a router's lease is live, so the lease is taken
last, when the members are known and the index has caught up, and given up first when the router leaves.  Without the lease
there are no decisions: held requests are given back, and read again when the lease is there again.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.failure_detector import FailureDetector
from headrace.broker.membership.janitor import Janitor
from headrace.broker.membership.mover import Mover
from headrace.broker.messages import RouterMember
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.tasks import TaskScope
from headrace.router.placement.types import Placement
from headrace.router.session import metrics
from headrace.router.session.assessor import Assessor
from headrace.router.session.credit import RequestCredit
from headrace.router.session.deps import RouterDeps
from headrace.router.session.dispatcher import Dispatcher
from headrace.router.session.gauges import SessionGauges
from headrace.router.session.held_request import HeldRequest
from headrace.router.session.inbox import RouterInbox
from headrace.router.session.intake import Intake
from headrace.router.session.placement_events import Announcer
from headrace.router.session.placement_outcomes import PlacementOutcomes
from headrace.router.session.placer import Placer
from headrace.router.session.ports import PoolIndex, SchedulingPort
from headrace.router.session.prediction_accuracy import PredictionAccuracy
from headrace.router.session.refusals import Refuser
from headrace.router.session.release import RequestRelease
from headrace.router.session.roster import Roster
from headrace.router.session.state import RouterState, ServingPermission
from headrace.router.session.suspect_waits import SuspectWaits
from headrace.router.session.tenants import TenantCount
from headrace.router.session.timers import RouterTimers, index_ready, members_known
from headrace.router.session.waker import Waker
from headrace.router.session.window import RequestWindow

log = structlog.get_logger()

POLL_S = 0.01


class RouterSession:
    """Serves one pool while `run` runs, until `drain` is through."""

    def __init__(
        self,
        deps: RouterDeps,
        scheduler: SchedulingPort,
        *,
        index: PoolIndex | None = None,
        record: Callable[[HeldRequest, Placement], None] | None = None,
    ) -> None:
        """Without `index` placements know nothing of caches. `record` is called with every placement."""
        self._deps = deps
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._listed = False
        self._forget_members: Callable[[], None] = lambda: None
        self._tasks = TaskScope()
        self._lease = self._make_lease()
        timing = deps.options.timing
        self._state = state = RouterState(
            RequestWindow(deps.pool, ack_wait_s=timing.ack_wait_s),
            scheduler,
            Tombstones(keep_s=timing.tombstone_s),
            ServingPermission(self._lease),
            asyncio.Event(),
        )
        self.window = state.window
        self._roster = Roster(deps, scheduler, index)
        accuracy = PredictionAccuracy()
        self._credit = RequestCredit(deps.options, state)
        self._release = RequestRelease(state, self._credit)
        refuser = Refuser(deps, self._tasks, state.permission, self._release)
        outcomes = PlacementOutcomes(state, self._release, refuser, Announcer(deps), accuracy, record)
        placer = Placer(deps, self._tasks, outcomes)
        self._dispatcher = Dispatcher(deps.options, state, placer, refuser, self._release, SuspectWaits(deps.pool))
        assessor = Assessor(deps, self._tasks, state)
        self._intake = Intake(deps, state, self._credit, refuser, assessor, self._dispatcher.place_now)
        self._inbox = RouterInbox(deps, state, self._roster, accuracy, self._release)
        self._timers = RouterTimers(
            deps,
            state,
            self._credit,
            self._release,
            roster=self._roster,
            gauges=SessionGauges(deps.pool, scheduler, index, state.window),
            tenants=TenantCount(deps, state),
        )
        self._janitor, self._detector = self._make_watchers()

    def _make_lease(self) -> LeaseKeeper:
        deps = self._deps
        return LeaseKeeper(
            deps.messaging,
            deps.subjects.bucket("members"),
            deps.subjects.router_key(deps.pool, deps.router),
            encode(self._member()),
            ttl_s=deps.members.lease_ttl_s,
            on_change=self._on_lease,
        )

    def _member(self) -> RouterMember:
        deps = self._deps
        return RouterMember(
            router=deps.router,
            pool=deps.pool,
            started=deps.wall(),
            host=socket.gethostname(),
            pid=os.getpid(),
            wakes=deps.options.wake_on_demand,
        )

    def _make_watchers(self) -> tuple[Janitor, FailureDetector]:
        deps, timing = self._deps, self._deps.options.timing
        mover = Mover(deps.messaging, deps.subjects, pool=deps.pool, timing=timing, wall=deps.wall)
        janitor = Janitor(deps.messaging, deps.subjects, deps.members, mover, pool=deps.pool, timing=timing)
        detector = FailureDetector(
            deps.messaging, deps.subjects, deps.members, pool=deps.pool, me=deps.router, ttl_s=deps.members.lease_ttl_s
        )
        return janitor, detector

    @property
    def router(self) -> str:
        return self._deps.router

    @property
    def pool(self) -> str:
        return self._deps.pool

    async def run(self) -> None:
        """Serve until `drain` is through, or until cancelled. Raises what one of its parts raises, and has stopped then."""
        self._forget_members = self._deps.members.on_change(self._on_members)
        await self._inbox.subscribe()
        async with self._tasks as tasks:
            serving = [tasks.spawn(part) for part in (self._begin(), self._timers.run(), self._detector.run())]
            if self._index is not None:
                serving.append(tasks.spawn(self._index.follower.run()))
            await self._done.wait()
            self._dispatcher.abandon()
            for task in serving:
                task.cancel()

    async def abandon(self) -> None:
        """Let go of everything after `run` has failed.

        Waiting requests are given back without asking the scheduler, which may be what has failed.  Without the lease workers
        place requests themselves.
        """
        self._forget_members()
        for held in self.window:
            if held.waiting and self.window.claims_valid:
                held.delivery.nak()
            self.window.remove(held)
        await self._lease.release()
        await self._inbox.unsubscribe()

    async def _begin(self) -> None:
        """Wait until there is enough to decide by, then take the lease and work."""
        await members_known(self._deps.members, pool=self.pool)
        self._listed = True
        self._roster.refresh(self._loop.time())
        if self._index is not None:
            await index_ready(self._index.follower, pool=self.pool, longest_s=self._deps.options.index_wait_s)
        async with asyncio.TaskGroup() as serving:
            serving.create_task(self._lease.run())
            serving.create_task(self._intake.run())
            serving.create_task(self._dispatcher.run())
            if self._deps.options.wake_on_demand:
                serving.create_task(Waker(self._deps, self._state).run())
            serving.create_task(self._janitor.run(lambda: self._lease.held))  # every router: copies are told apart by id

    @property
    def ready(self) -> bool:
        """The router places: its lease is held, and it does not drain."""
        return self._state.permission.granted

    def standing(self) -> dict[str, Any]:
        """Return how this session stands, for orchestrators."""
        permission, index = self._state.permission, self._index
        return {
            "ready": self.ready,
            "lease_held": permission.lease_held,
            "window": len(self.window),
            "workers": len(self._deps.members.serving_workers(self.pool)),
            **({"index_ready": index.follower.ready, "index_lag": index.follower.lag} if index is not None else {}),
        }

    async def drain(self, grace_s: float) -> None:
        """Take nothing more, give waiting requests back, finish placements within the grace period, and leave."""
        if self._state.permission.draining:
            await self._done.wait()
            return
        self._state.permission.drain()
        log.info("router.draining", router=self.router, pool=self.pool, held=len(self.window))
        await self._intake.stop()
        self._release.give_back_waiting()
        deadline = self._loop.time() + grace_s
        while self._dispatcher.busy and self._loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        try:
            async with asyncio.timeout(self._deps.options.timing.rpc_timeout_s):
                await self._lease.release()
                if self._index is not None:
                    await self._index.follower.release()
        except TimeoutError:
            log.info("router.release_late", router=self.router, pool=self.pool)
        self._done.set()

    def _on_members(self) -> None:
        self._state.scheduler.set_routers(self._deps.members.routers(self.pool))
        if self._listed and self._roster.refresh(self._loop.time()):
            self._state.changed.set()
        self._janitor.wake()

    def _on_lease(self, held: bool) -> None:
        if held:
            self._on_gained()
        else:
            self._on_lapse()

    def _on_gained(self) -> None:
        log.info("router.ready", router=self.router, pool=self.pool, workers=len(self._deps.members.workers(self.pool)))
        self._credit.balance()
        self._state.changed.set()

    def _on_lapse(self) -> None:
        metrics.LEASE_LAPSES.inc()
        log.warning("router.fenced", router=self.router, pool=self.pool, held=len(self.window))
        self._release.give_back_waiting()
        self._credit.balance()
