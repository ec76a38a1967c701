"""Periodic work of a router session: wait at the start, extend claims, set gauges, drop requests of judges that are gone."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker.membership.members import Members
from headrace.jetstream.errors import JetStreamError
from headrace.router.session import metrics
from headrace.router.session.credit import RequestCredit
from headrace.router.session.deps import RouterDeps
from headrace.router.session.gauges import SessionGauges
from headrace.router.session.ports import Feed
from headrace.router.session.release import RequestRelease
from headrace.router.session.roster import Roster
from headrace.router.session.state import RouterState
from headrace.router.session.tenants import TenantCount

log = structlog.get_logger()

TICK_S = 0.1
MEMBERS_WAIT_S = 5.0
POLL_S = 0.01
TENANTS_S = 1.0


async def members_known(members: Members, *, pool: str) -> None:
    """Return once all leases have been read. Log a warning while that takes long."""
    while True:
        try:
            await members.ready(MEMBERS_WAIT_S)
        except (JetStreamError, TimeoutError) as error:
            log.warning("router.waiting", pool=pool, waiting_for="members", error=str(error))
        else:
            return


async def index_ready(feed: Feed, *, pool: str, longest_s: float) -> None:
    """Return once the index has caught up, or after `longest_s`, because requests wait for this."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + longest_s
    while not feed.ready and loop.time() < deadline:
        await asyncio.sleep(POLL_S)
    if not feed.ready:
        metrics.INDEX_WAITS.inc()
        log.warning("index.not_awaited", pool=pool, waited_s=longest_s, lag=feed.lag)


class RouterTimers:
    """Runs the periodic work of one session."""

    def __init__(
        self,
        deps: RouterDeps,
        state: RouterState,
        credit: RequestCredit,
        release: RequestRelease,
        *,
        roster: Roster,
        gauges: SessionGauges,
        tenants: TenantCount,
    ) -> None:
        self._messaging = deps.messaging
        self._members = deps.members
        self._pool = deps.pool
        self._timing = deps.options.timing
        self._window = state.window
        self._tombstones = state.tombstones
        self._permission = state.permission
        self._credit = credit
        self._release = release
        self._roster = roster
        self._gauges = gauges
        self._tenants = tenants

    async def run(self) -> None:
        """Work until cancelled."""
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
                self._release.give_back_waiting()
            if self._messaging.connected:
                self._window.extend()
            self._credit.balance()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._tombstones.expire(now)
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
            if not self._permission.lease_held:
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
                self._release.drop(held, "judge_gone")
