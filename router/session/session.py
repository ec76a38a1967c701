"""A router in one pool: it pulls requests, asks the scheduler, and carries out its decisions.

A request goes one way through the parts, each of which is constructed before the one that hands on to it:

    Intake ──> RequestWindow, scheduler ──> Dispatcher ──> Placer ──> RequestWindow (settled)
      │                                         │            │
      └────────────────────────────────────> Refuser <───────┘

A router works under its lease only.  Workers stop placing on themselves while a router's lease is live, so the lease is taken
last, when the members are known and the index has caught up, and given up first when the router leaves.  Without the lease
there are no decisions: held requests are given back, and read again when the lease is there again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.failure_detector import FailureDetector
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Janitor, Mover
from headrace.broker.messages.members import RouterMember
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.subjects import BATCH_CLASSES
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import request_stream
from headrace.router.index.follower import KvFollower
from headrace.router.placement.types import Placement
from headrace.router.session import metrics
from headrace.router.session.inbox import Roster, RouterInbox
from headrace.router.session.intake import Intake, Waker
from headrace.router.session.metrics import PredictionAccuracy
from headrace.router.session.placing import Dispatcher, Placer, Refuser
from headrace.router.session.window import HeldRequest, PoolIndex, RequestWindow, RouterDeps, SchedulingPort

log = structlog.get_logger()

CROWDED = 256  # requests held, from which on it matters whose they are


class TenantCount:
    """Tells the scheduler whether several tenants have interactive requests, in the window or in the streams behind it.

    Batch requests are bounded by a window of their own and take no turn from others.
    """

    def __init__(self, deps: RouterDeps, window: RequestWindow) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._pool = deps.pool
        self._window = window
        self._scheduler = window.scheduler

    async def refresh(self) -> None:
        """Count anew. With a short window there is nothing to protect, and with an error the last count stays."""
        held = self._window.counts
        if sum(count for name, count in held.items() if name not in BATCH_CLASSES) < CROWDED:
            self._scheduler.several_tenants = False
            return
        stream = request_stream(self._subjects, "std")
        try:
            counts = await self._messaging.subject_counts(stream, self._subjects.req_filter_all(self._pool))
        except JetStreamError as error:
            log.debug("crowd.unknown", pool=self._pool, error=str(error))
            return
        waiting = map(self._subjects.parse_req, counts)
        tenants = {subject.tenant for subject in waiting if subject.request_class not in BATCH_CLASSES}
        self._scheduler.several_tenants = len(tenants) > 1


AGE_EVERY_S = 1.0  # every held request is looked at for it


class SessionGauges:
    def __init__(self, window: RequestWindow, index: PoolIndex | None, *, wall: Callable[[], float] = time.time) -> None:
        self._pool = window.pool
        self._scheduler = window.scheduler
        self._index = index
        self._window = window
        self._wall = wall
        self._age_due_s = 0.0

    def refresh(self, now_s: float) -> None:
        if now_s >= self._age_due_s:
            self._age_due_s = now_s + AGE_EVERY_S
            metrics.OLDEST_S.labels(self._pool).set(self._window.oldest_s(self._wall()))
        metrics.PREFILL_QUEUE.labels(self._pool).set(self._scheduler.queued_prefill_tokens(now_s))
        if self._index is not None:
            metrics.INDEX_READY.labels(self._pool).set(self._index.follower.ready)
            metrics.LAG.labels(self._pool).set(self._index.follower.lag)
            metrics.INDEX_ENTRIES.labels(self._pool).set(len(self._index.entries))


TICK_S = 0.1
MEMBERS_WAIT_S = 5.0
POLL_S = 0.01
TENANTS_S = 1.0


async def members_known(members: Members, *, pool: str) -> None:
    while True:
        try:
            await members.ready(MEMBERS_WAIT_S)
        except (JetStreamError, TimeoutError) as error:
            log.warning("router.waiting", pool=pool, waiting_for="members", error=str(error))
        else:
            return


async def index_ready(feed: KvFollower, *, pool: str, longest_s: float) -> None:
    """Return once the index has caught up, or after `longest_s`, because requests wait for this."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + longest_s
    while not feed.ready and loop.time() < deadline:
        await asyncio.sleep(POLL_S)
    if not feed.ready:
        metrics.INDEX_WAITS.inc()
        log.warning("index.not_awaited", pool=pool, waited_s=longest_s, lag=feed.lag)


class RouterTimers:
    def __init__(self, deps: RouterDeps, window: RequestWindow, roster: Roster, index: PoolIndex | None) -> None:
        self._messaging = deps.messaging
        self._members = deps.members
        self._pool = deps.pool
        self._timing = deps.options.timing
        self._window = window
        self._roster = roster
        self._gauges = SessionGauges(window, index)
        self._tenants = TenantCount(deps, window)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._extend())
            tasks.create_task(self._tick())
            tasks.create_task(self._drop_orphans())
            tasks.create_task(self._count_tenants())

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            if not self._window.claims_valid:
                log.warning("window.let_go", pool=self._pool, held=len(self._window), why="not extended in time")
                self._window.give_back_waiting()
            if self._messaging.connected:
                self._window.extend()
            self._window.balance()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._window.tombstones.expire(now)
            self._roster.trust_senders(now)
            self._gauges.refresh(now)

    async def _count_tenants(self) -> None:
        while True:
            await asyncio.sleep(TENANTS_S)
            await self._tenants.refresh()

    async def _drop_orphans(self) -> None:
        """Drop waiting requests whose judge is gone: their answers have no reader, and they take up the window."""
        while True:
            await asyncio.sleep(self._timing.silence_s)
            if not self._window.lease_held:
                continue
            waiting = [held for held in self._window if held.waiting]
            for judge in {held.head.judge: None for held in waiting if not self._members.ingress_live(held.head.judge)}:
                await self._drop_if_gone(judge)

    async def _drop_if_gone(self, judge: str) -> None:
        asked = [held for held in self._window if held.waiting and held.head.judge == judge]
        if not await self._members.ingress_gone(judge):
            return
        for held in asked:  # not those that have arrived while the answer was on its way
            if held.waiting:
                self._window.drop(held, "judge_gone")


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
        self.window = window = RequestWindow(deps, scheduler, self._lease)
        self._roster = Roster(deps, scheduler, index)
        accuracy = PredictionAccuracy()
        refuser = Refuser(deps, self._tasks, window)
        placer = Placer(deps, self._tasks, window, refuser, accuracy, record)
        self._dispatcher = Dispatcher(deps.options, window, placer, refuser)
        self._intake = Intake(deps, self._tasks, window, refuser, self._dispatcher.place_now)
        self._inbox = RouterInbox(deps, window, self._roster, accuracy)
        self._timers = RouterTimers(deps, window, self._roster, index)
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
        """Release everything after `run` has failed.

        Waiting requests are given back without asking the scheduler, which may be what has failed. Without the lease workers
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
                serving.create_task(Waker(self._deps, self.window).run())
            serving.create_task(self._janitor.run(lambda: self._lease.held))  # every router: copies are told apart by id

    @property
    def ready(self) -> bool:
        return self.window.granted

    def standing(self) -> dict[str, Any]:
        index = self._index
        return {
            "ready": self.ready,
            "lease_held": self.window.lease_held,
            "window": len(self.window),
            "workers": len(self._deps.members.serving_workers(self.pool)),
            **({"index_ready": index.follower.ready, "index_lag": index.follower.lag} if index is not None else {}),
        }

    async def drain(self, grace_s: float) -> None:
        if self.window.draining:
            await self._done.wait()
            return
        self.window.draining = True
        log.info("router.draining", router=self.router, pool=self.pool, held=len(self.window))
        await self._intake.stop()
        self.window.give_back_waiting()
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
        self.window.scheduler.set_routers(self._deps.members.routers(self.pool))
        if self._listed and self._roster.refresh(self._loop.time()):
            self.window.changed.set()
        self._janitor.wake()

    def _on_lease(self, held: bool) -> None:
        if held:
            self._on_gained()
        else:
            self._on_lapse()

    def _on_gained(self) -> None:
        log.info("router.ready", router=self.router, pool=self.pool, workers=len(self._deps.members.workers(self.pool)))
        self.window.balance()
        self.window.changed.set()

    def _on_lapse(self) -> None:
        metrics.LEASE_LAPSES.inc()
        log.warning("router.fenced", router=self.router, pool=self.pool, held=len(self.window))
        self.window.give_back_waiting()
        self.window.balance()
