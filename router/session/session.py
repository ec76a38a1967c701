"""One router in one pool: takes requests, asks the scheduler, carries out what it decides.

It works under its lease only.  Workers stop placing on themselves while a router's lease is live, so the lease is taken last,
when the members are known and the index has caught up, and given up first when the router leaves.  Without the lease there
are no decisions: what is held is given back and read again when the lease is there again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.failure_detector import FailureDetector
from headrace.broker.membership.janitor import Janitor
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Mover
from headrace.broker.messages import Inspection, RouterMember
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import request_stream
from headrace.router.index.types import CacheView
from headrace.router.placement.types import Placement
from headrace.router.session import metrics
from headrace.router.session.dispatcher import Dispatcher
from headrace.router.session.inbox import RouterInbox
from headrace.router.session.intake import Intake
from headrace.router.session.ports import CacheFeed, Feed, Scheduling
from headrace.router.session.prediction_accuracy import PredictionAccuracy
from headrace.router.session.roster import Roster
from headrace.router.session.timers import RouterTimers, index_ready, members_known
from headrace.router.session.window import HeldRequest, RequestWindow
from headrace.router.settings import SessionOptions

log = structlog.get_logger()

LEAST_NAP_S = 0.001
POLL_S = 0.01
CROWDED = 256  # requests held, from which on it matters whose they are


class RouterSession:
    """Serves one pool while `run` runs, until `drain` is through. The owner runs `members`."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        pool: str,
        scheduler: Scheduling,
        *,
        router: str,
        members: Members,
        view: CacheView | None = None,
        caches: CacheFeed | None = None,
        feed: Feed | None = None,
        index_size: Callable[[], int] | None = None,
        prefill_queue: Callable[[float], float] | None = None,
        record: Callable[[HeldRequest, Placement], None] | None = None,
        options: SessionOptions | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`feed` writes into `view` through `caches`; without them placements know nothing of caches. `prefill_queue` tells the
        tokens that wait for prefill workers at a time. `record` hears of each placement."""
        self.router = router
        self.pool = pool
        self.options = options or SessionOptions()
        self._timing = timing = self.options.timing
        self._messaging = messaging
        self._subjects = subjects
        self._scheduler = scheduler
        self._members = members
        self._feed = feed
        self._index_size = index_size
        self._prefill_queue = prefill_queue
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._done = asyncio.Event()
        self._listed = False
        self._draining = False
        self.window = RequestWindow(pool, ack_wait_s=timing.ack_wait_s)
        self.roster = Roster(pool, members, scheduler, view, caches, self.options)
        self._tombstones = Tombstones(keep_s=timing.tombstone_s)
        hindsight = PredictionAccuracy()
        self._lease = LeaseKeeper(
            messaging,
            subjects.bucket("members"),
            subjects.router_key(pool, router),
            encode(RouterMember(router=router, pool=pool, started=wall())),
            ttl_s=timing.lease_ttl_s,
            on_lapse=self._on_lapse,
            on_gained=self._on_gained,
        )
        self._desk = Dispatcher(
            messaging,
            subjects,
            members,
            self.window,
            scheduler,
            self._tombstones,
            hindsight,
            pool=pool,
            router=router,
            options=self.options,
            may_take=self._may_take,
            changed=self._changed.set,
            record=record,
            wall=wall,
        )
        self._intake = Intake(
            messaging,
            subjects,
            self.window,
            scheduler,
            self._tombstones,
            pool=pool,
            options=self.options,
            may_take=self._may_take,
            on_offered=self._changed.set,
            refuse=self._desk.refuse,
            wall=wall,
        )
        self._desk.balance = self._intake.balance
        self._inbox = RouterInbox(
            messaging,
            subjects,
            scheduler,
            self.roster,
            self._tombstones,
            hindsight,
            pool=pool,
            router=router,
            on_news=self._changed.set,
            on_cancelled=lambda held: self._desk.settle(held, "cancelled"),
            inspect=self.inspect,
            wall=wall,
        )
        mover = Mover(messaging, subjects, pool=pool, timing=timing, wall=wall)
        self._janitor = Janitor(messaging, subjects, members, mover, pool=pool, timing=timing)
        self._prober = FailureDetector(messaging, subjects, members, pool=pool, me=router, ttl_s=timing.lease_ttl_s)
        self._upkeep = RouterTimers(
            messaging,
            self.window,
            members,
            self._tombstones,
            pool=pool,
            timing=timing,
            lease_held=lambda: self._lease.held,
            balance=self._intake.balance,
            let_go=self._desk.let_go,
            drop=lambda held: self._desk.drop(held, "judge_gone"),
            gauges=self._gauges,
            crowd=self._look_at_crowd,
        )

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `drain` is through, or until cancelled."""
        self._members.on_change(self._on_members)
        await self._inbox.subscribe()
        async with asyncio.TaskGroup() as tasks:
            self._desk.open(tasks)
            serving = [tasks.create_task(part) for part in (self._begin(), self._upkeep.run(), self._prober.run())]
            if self._feed is not None:
                serving.append(tasks.create_task(self._feed.run()))
            await self._done.wait()
            self._desk.close()
            for task in serving:
                task.cancel()

    async def _begin(self) -> None:
        """Wait until there is enough to decide by, then take the lease and work."""
        await members_known(self._members, pool=self.pool)
        self._listed = True
        self.roster.refresh(self._loop.time())
        if self._feed is not None:
            await index_ready(self._feed, pool=self.pool, longest_s=self.options.index_wait_s)
        async with asyncio.TaskGroup() as serving:
            serving.create_task(self._lease.run())
            serving.create_task(self._intake.run())
            serving.create_task(self._decide())
            serving.create_task(self._janitor.run(lambda: self._lease.held))  # every router: copies are told apart by id

    @property
    def ready(self) -> bool:
        """It places: the lease is held."""
        return self._lease.held and not self._draining

    async def drain(self, grace_s: float) -> None:
        """Take nothing more, give back what waits, finish what is being placed within the grace period, leave."""
        if self._draining:
            await self._done.wait()
            return
        self._draining = True
        log.info("router.draining", router=self.router, pool=self.pool, held=len(self.window))
        await self._intake.stop()
        self._desk.let_go()
        deadline = self._loop.time() + grace_s
        while self._desk.busy and self._loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        try:
            async with asyncio.timeout(self._timing.rpc_timeout_s):
                await self._lease.release()
                if self._feed is not None:
                    await self._feed.release()
        except TimeoutError:
            log.info("router.release_late", router=self.router, pool=self.pool)
        self._done.set()

    def inspect(self) -> Inspection:
        states: dict[str, int] = {}
        for held in self.window:
            states[held.state] = states.get(held.state, 0) + 1
        return Inspection(component=self.router, states=states, lease_held=self._lease.held, draining=self._draining)

    # -- decide ----------------------------------------------------------------------------------------------

    def _may_take(self) -> bool:
        return self._lease.held and not self._draining

    async def _decide(self) -> None:
        while True:
            self._changed.clear()
            self._desk.look()
            now = self._loop.time()
            nap_s = self.options.look_s
            if self._scheduler.waiting and (wake_s := self._scheduler.next_wake_s(now)) is not None:
                nap_s = min(nap_s, max(LEAST_NAP_S, wake_s - now))
            try:
                async with asyncio.timeout(nap_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    # -- time and trouble ------------------------------------------------------------------------------------

    async def _look_at_crowd(self) -> None:
        """A limit on one tenant protects others only if there are others, in the window or in the streams behind it."""
        if len(self.window) < CROWDED:
            self._scheduler.several_tenants = False
            return
        stream = request_stream(self._subjects, "std")
        try:
            counts = await self._messaging.subject_counts(stream, self._subjects.req_filter_all(self.pool))
        except JetStreamError as error:
            log.debug("crowd.unknown", pool=self.pool, error=str(error))
            return
        self._scheduler.several_tenants = len({self._subjects.parse_req(subject).tenant for subject in counts}) > 1

    def _gauges(self) -> None:
        self.roster.look(self._loop.time())
        if self._feed is not None:
            metrics.INDEX_READY.labels(self.pool).set(self._feed.ready)
            metrics.LAG.labels(self.pool).set(self._feed.lag)
        if self._prefill_queue is not None:
            metrics.PREFILL_QUEUE.labels(self.pool).set(self._prefill_queue(self._loop.time()))
        if self._index_size is not None:
            metrics.INDEX_ENTRIES.labels(self.pool).set(self._index_size())

    def _on_members(self) -> None:
        self._scheduler.set_routers(self._members.routers(self.pool))
        if self._listed and self.roster.refresh(self._loop.time()):
            self._changed.set()
        self._janitor.wake()

    def _on_gained(self) -> None:
        log.info("router.ready", router=self.router, pool=self.pool, workers=len(self._members.workers(self.pool)))
        self._intake.balance()
        self._changed.set()

    def _on_lapse(self) -> None:
        metrics.LEASE_LAPSES.inc()
        log.warning("router.fenced", router=self.router, pool=self.pool, held=len(self.window))
        self._desk.let_go()
        self._intake.balance()
