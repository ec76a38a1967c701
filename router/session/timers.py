"""What a router session does by the clock: wait at the start, extend its claims, drop what nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from headrace.broker.membership.members import Members
from headrace.broker.protocol.runs import Tombstones
from headrace.broker.settings import Timing
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.router.session import metrics
from headrace.router.session.ports import Feed
from headrace.router.session.window import HeldRequest, RequestWindow

log = structlog.get_logger()

TICK_S = 0.1
MEMBERS_WAIT_S = 5.0
POLL_S = 0.01
CROWD_S = 1.0


async def members_known(members: Members, *, pool: str) -> None:
    """Return once all leases have been read; says so while that takes long."""
    while True:
        try:
            await members.ready(MEMBERS_WAIT_S)
        except (JetStreamError, TimeoutError) as error:
            log.warning("router.waiting", pool=pool, waiting_for="members", error=str(error))
        else:
            return


async def index_ready(feed: Feed, *, pool: str, longest_s: float) -> None:
    """Return once the index has caught up, or after `longest_s`: requests wait for this."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + longest_s
    while not feed.ready and loop.time() < deadline:
        await asyncio.sleep(POLL_S)
    if not feed.ready:
        metrics.INDEX_WAITS.inc()
        log.warning("index.not_awaited", pool=pool, waited_s=longest_s, lag=feed.lag)


class RouterTimers:
    """The clockwork of one session."""

    def __init__(
        self,
        messaging: Messaging,
        window: RequestWindow,
        members: Members,
        tombstones: Tombstones,
        *,
        pool: str,
        timing: Timing,
        lease_held: Callable[[], bool],
        balance: Callable[[], None],
        let_go: Callable[[], None],
        drop: Callable[[HeldRequest], None],
        gauges: Callable[[], None],
        crowd: Callable[[], Awaitable[None]],
    ) -> None:
        """`let_go`: of all that waits. `drop`: this one, for good. `gauges`: show what is shown as a number.
        `crowd`: see whose requests there are."""
        self._messaging = messaging
        self._window = window
        self._members = members
        self._tombstones = tombstones
        self._pool = pool
        self._timing = timing
        self._lease_held = lease_held
        self._balance = balance
        self._let_go = let_go
        self._drop = drop
        self._gauges = gauges
        self._crowd = crowd

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._extend())
            tasks.create_task(self._tick())
            tasks.create_task(self._look_for_judges())
            tasks.create_task(self._look_at_crowd())

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            if not self._window.ours:
                log.warning("window.let_go", pool=self._pool, held=len(self._window), why="not extended in time")
                self._let_go()
            if self._messaging.connected:
                self._window.extend()
            self._balance()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            self._tombstones.expire(loop.time())
            self._gauges()

    async def _look_at_crowd(self) -> None:
        while True:
            await asyncio.sleep(CROWD_S)
            await self._crowd()

    async def _look_for_judges(self) -> None:
        """Nobody waits for the answers of a judge that is gone: its requests do not take up the window."""
        while True:
            await asyncio.sleep(self._timing.silence_s)
            if not self._lease_held():
                continue
            waiting = [held for held in self._window if held.state == "waiting"]
            for judge in {held.head.judge: None for held in waiting if not self._members.ingress_live(held.head.judge)}:
                await self._drop_if_gone(judge)

    async def _drop_if_gone(self, judge: str) -> None:
        asked = [held for held in self._window if held.state == "waiting" and held.head.judge == judge]
        if not await self._members.ingress_gone(judge):
            return
        for held in asked:  # not those that have arrived while the answer was on its way
            if held.state == "waiting":
                self._drop(held)
