"""The router process: one session for each pool, started as models appear, drained together on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from functools import partial
from typing import Any

import structlog

from headrace.base.process import ending_signals
from headrace.broker.membership.members import Members
from headrace.broker.models.cards import ModelCard, readable_card
from headrace.broker.part_state import PartState, Standing
from headrace.jetstream.client import Connection, ConnectOptions, connect_patiently
from headrace.jetstream.ports import Change, Messaging
from headrace.jetstream.provision import bucket_copies, ensure_topology
from headrace.jetstream.subjects import Subjects, check_token
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology
from headrace.router.index.follower import KvFollower
from headrace.router.index.snapshotter import ReplicaDeps
from headrace.router.index.view import Caches, create_index
from headrace.router.placement.fleet_grid import read_grid
from headrace.router.placement.policies import policy_factory
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.replay import Recorder
from headrace.router.session import metrics
from headrace.router.session.session import RouterSession
from headrace.router.session.window import PoolIndex, RouterDeps
from headrace.router.settings import RouterOptions

# The pools of a router process: those of the models with a card, each with a session that is restarted when it fails.

log = structlog.get_logger()


class Pools:
    """Watches the model cards. A pool is reported once, and again when its block size has changed; the router of a pool goes on
    when the card is removed.
    """

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        on_pool: Callable[[ModelCard], None],
        *,
        namespace: str | None = None,
        models: Collection[str] = (),
    ) -> None:
        """`namespace` None: models of all namespaces. `models`: only these, by name or alias; empty: all."""
        self._on_pool = on_pool
        self._namespace = namespace
        self._models = frozenset(models)
        self._known: dict[str, int] = {}  # block sizes by pool
        self._watch = messaging.bucket(subjects.bucket("models")).watch(self._on_card)

    async def run(self) -> None:
        await self._watch.run()

    def _on_card(self, change: Change) -> None:
        if change.value is None:
            return
        card = readable_card(change.key, change.value)
        if card is None:
            return
        if self._namespace is not None and card.namespace != self._namespace:
            return
        if self._models and self._models.isdisjoint((card.model, *card.aliases)):
            return
        if self._known.get(card.pool) != card.block_size:
            self._known[card.pool] = card.block_size
            self._on_pool(card)


# Keeps the session of one pool running: a fault of the pool ends this session only, and it is started again after a while.
#
# What a pool's session reads (cards, leases, cache events, snapshots, load) was written by others. An error that none of its
# parts expects must not take the router away from all other pools.

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 30.0
STEADY_S = 60.0  # a session that ran so long has not failed for the reason of the last one
LEAVE_S = 2.0  # for giving up the lease and what a failed session holds
RENEW_S = 2.0  # for what is being placed when the card has changed


class PoolSession:
    def __init__(self, card: ModelCard, build: Callable[[], RouterSession]) -> None:
        self.pool = card.pool
        self._model = card.model
        self._build = build
        self._session: RouterSession | None = None
        self._leaving = asyncio.Event()
        self._renewed = False
        self._failure = ""
        self._failures = 0

    @property
    def session(self) -> RouterSession | None:
        return self._session

    @property
    def failing(self) -> bool:
        return bool(self._failure) and not self.ready

    @property
    def ready(self) -> bool:
        return self._session is not None and self._session.ready

    def standing(self) -> dict[str, Any]:
        facts = self._session.standing() if self._session is not None else {"ready": False}
        return {**facts, "failures": self._failures, **({"failure": self._failure} if self.failing else {})}

    async def run(self) -> None:
        """Serve until `drain` is through, whatever fails meanwhile."""
        metrics.SESSION_FAILURES.labels(self.pool)  # 0 from the start, or an alert would not see the first one
        loop = asyncio.get_running_loop()
        wait_s = FIRST_WAIT_S
        while not self._leaving.is_set():
            began_s = loop.time()
            try:
                self._renewed = False
                self._session = self._build()
                await self._session.run()
                if not self._renewed:
                    return
                await self._leave()
                continue
            except Exception as error:  # whatever it is: all other pools need this process
                if loop.time() - began_s >= STEADY_S:
                    wait_s = FIRST_WAIT_S
                self._note(error, wait_s)
                await self._leave()
            try:
                async with asyncio.timeout(wait_s):
                    await self._leaving.wait()
            except TimeoutError:
                wait_s = min(2 * wait_s, MOST_WAIT_S)

    async def renew(self, build: Callable[[], RouterSession]) -> None:
        """Go on with a new session, whose index is empty: the pool has another block size now."""
        self._build = build
        self._renewed = True
        if self._session is not None:
            await self._session.drain(RENEW_S)

    async def drain(self, grace_s: float) -> None:
        self._leaving.set()
        if self._session is not None:
            await self._session.drain(grace_s)

    def _note(self, error: Exception, again_in_s: float) -> None:
        self._failures += 1
        self._failure = _in_one_line(error)
        metrics.SESSION_FAILURES.labels(self.pool).inc()
        log.error(
            "session.failed",
            pool=self.pool,
            model=self._model,
            error=self._failure,
            failures=self._failures,
            again_in_s=again_in_s,
            exc_info=error,
        )

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await session.abandon()
        except Exception as error:
            log.warning("session.not_left", pool=self.pool, error=_in_one_line(error))


def _in_one_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]


# Makes the session of one pool; the id is unique to that session.
Build = Callable[[Messaging, Subjects, Members, ModelCard, str], RouterSession]


def router_id(name: str | None) -> str:
    """Return an id unique to this process start: the given name (or a random one) plus an epoch."""
    base = check_token(name, "router name") if name else f"r-{secrets.token_hex(3)}"
    return f"{base}-{int(time.time()):x}{secrets.token_hex(2)}"


async def run_router(
    options: RouterOptions,
    connect: ConnectOptions,
    subjects: Subjects,
    build: Build,
    *,
    state: PartState | None = None,
    on_started: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `state` receives the router's standing.

    Raises the ConnectError family when the broker cannot be used at the start.
    """
    async with _connected(connect, subjects, options.start_timeout_s) as connection:
        timing = options.session.timing.at_copies(await bucket_copies(connection, subjects.bucket("members")))
        members = Members(connection, subjects, lease_ttl_s=timing.lease_ttl_s, overdue_s=timing.overdue_s)
        process = RouterProcess(connection, subjects, options, build, state or PartState("router"), members=members)
        serving = asyncio.ensure_future(process.run())
        try:
            with _signals(process, serving, options.drain_grace_s):
                _quiet_gc()
                if on_started is not None:
                    on_started()
                await asyncio.wait({serving})
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
    log.info("router.stopped")


class RouterProcess:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        options: RouterOptions,
        build: Build,
        state: PartState,
        *,
        members: Members | None = None,
    ) -> None:
        self.id = router_id(options.name)
        self.pools: dict[str, PoolSession] = {}
        self._messaging = messaging
        self._subjects = subjects
        self._build = build
        self._state = state
        self._members = members or Members(messaging, subjects, lease_ttl_s=options.session.timing.lease_ttl_s)
        self._pools = Pools(messaging, subjects, self._on_pool, namespace=options.namespace, models=options.models)
        self._tasks = TaskScope()
        self._done = asyncio.Event()
        self._names: set[str] = set()  # of all sessions that there were
        self.draining = False

    @property
    def sessions(self) -> dict[str, RouterSession]:
        return {pool: kept.session for pool, kept in self.pools.items() if kept.session is not None}

    async def run(self) -> None:
        async with self._tasks as tasks:
            parts = (self._members.run(), self._pools.run(), self._state.keep(self._describe))
            helpers = [tasks.spawn(part) for part in parts]
            await self._done.wait()
            for helper in helpers:
                helper.cancel()

    def _describe(self) -> Standing:
        """Describe this router. Ready: it is connected, and its session of every pool that it knows places requests.

        Pools whose sessions fail do not count, unless all do: a fault of one pool is no fault of this process.
        """
        pools = {pool: kept.standing() for pool, kept in self.pools.items()}
        failing = {pool for pool, kept in self.pools.items() if kept.failing}
        behind = sorted(pool for pool, facts in pools.items() if not facts["ready"])
        if failing != pools.keys():
            behind = [pool for pool in behind if pool not in failing]
        if self.draining:
            why = "draining"
        elif not self._messaging.connected:
            why = "no connection to the NATS server"
        else:
            why = f"not placing yet in {', '.join(behind)}" if behind else ""
        return Standing(ready=not why, healthy=not why or self.draining, why=why, facts={"router": self.id, "pools": pools})

    async def drain(self, grace_s: float) -> None:
        self.draining = True
        await asyncio.gather(*(kept.drain(grace_s) for kept in self.pools.values()))
        self._done.set()

    def _on_pool(self, card: ModelCard) -> None:
        if self.draining:
            return
        if (kept := self.pools.get(card.pool)) is not None:
            log.info("pool.renewed", pool=card.pool, model=card.model, block_size=card.block_size)
            self._tasks.spawn(kept.renew(partial(self._session_of, card)))
            return
        kept = self.pools[card.pool] = PoolSession(card, partial(self._session_of, card))
        log.info("pool.known", pool=card.pool, model=card.model)
        self._tasks.spawn(kept.run())

    def _session_of(self, card: ModelCard) -> RouterSession:
        first = name = f"{self.id}-{card.pool[-8:]}"  # the hash of the pool: control messages go to one session
        count = 1
        while name in self._names:
            count += 1
            name = f"{first}-{count}"
        self._names.add(name)
        return self._build(self._messaging, self._subjects, self._members, card, name)


@contextlib.contextmanager
def _signals(process: RouterProcess, serving: asyncio.Future[None], grace_s: float) -> Iterator[None]:
    """Drain on the first signal, end at once on the second: then held requests are delivered again after a while."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def leave() -> None:
        if process.draining:
            serving.cancel()
        else:
            draining.append(loop.create_task(process.drain(grace_s)))

    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        for task in draining:
            task.cancel()


@contextlib.asynccontextmanager
async def _connected(options: ConnectOptions, subjects: Subjects, timeout_s: float) -> AsyncIterator[Connection]:
    async with await connect_patiently(options, subjects=subjects, timeout_s=timeout_s) as connection:
        topology = Topology(subjects, replicas=options.replicas)
        await ensure_topology(connection, topology)

        async def restore() -> None:
            await ensure_topology(connection, topology)  # memory streams vanish with a server restart

        connection.on_reconnect(restore)
        yield connection


def _quiet_gc() -> None:
    """Keep the collector off what was loaded at the start, which stays, and run it less often on the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def builder(options: RouterOptions, settings: SchedulerSettings) -> Build:
    """Return the function that `run_router` calls for each pool. It raises SettingsInvalid for an index that cannot be.

    Raises SettingsInvalid for a grid of fleets that cannot be read, or a policy that cannot be loaded.
    """
    policy_factory(settings.policy)  # not only when the first pool appears
    grid = read_grid(options.fleet_grid) if options.fleet_grid is not None else None

    def build(messaging: Messaging, subjects: Subjects, members: Members, card: ModelCard, router: str) -> RouterSession:
        index = create_index(max_entries=options.index_entries)
        view = Caches(index)
        follower = KvFollower(
            ReplicaDeps(
                messaging=messaging,
                subjects=subjects,
                pool=card.pool,
                router=router,
                block_size=card.block_size,
                settings=options.snapshots,
            ),
            view,
            index,
            members=members,
        )
        seed = random.SystemRandom().getrandbits(32)
        scheduler = Scheduler(settings, view, name=router, seed=seed, grid=grid)
        return RouterSession(
            RouterDeps(
                messaging=messaging,
                subjects=subjects,
                members=members,
                pool=card.pool,
                router=router,
                block_size=card.block_size,
                options=options.session,
            ),
            scheduler,
            index=PoolIndex(view, follower.reader.sources, follower, index),
            record=Recorder(messaging, subjects, pool=card.pool, router=router).placed if options.record else None,
        )

    return build
