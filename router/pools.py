"""The pools of a router process: those of the models with a card, each with a session that is restarted when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import structlog

from headrace.broker.models.cards import ModelCard, readable_card
from headrace.jetstream.ports import Change, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.session import metrics
from headrace.router.session.session import RouterSession

log = structlog.get_logger()


class Pools:
    """Watches the model cards. A pool is reported once; its router goes on when the card is removed."""

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
        self._known: set[str] = set()
        self._watch = messaging.bucket(subjects.bucket("models")).watch(self._on_card)

    async def run(self) -> None:
        await self._watch.run()

    def _on_card(self, change: Change) -> None:
        if change.value is None or change.key in self._known:
            return
        card = readable_card(change.key, change.value)
        if card is None:
            return
        if self._namespace is not None and card.namespace != self._namespace:
            return
        if self._models and self._models.isdisjoint((card.model, *card.aliases)):
            return
        self._known.add(card.pool)
        self._on_pool(card)


# Keeps the session of one pool running: a fault of the pool ends this session only, and it is started again after a while.
#
# What a pool's session reads (cards, leases, cache events, snapshots, load) was written by others. An error that none of its
# parts expects must not take the router away from all other pools.

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 30.0
STEADY_S = 60.0  # a session that ran so long has not failed for the reason of the last one
LEAVE_S = 2.0  # for giving up the lease and what a failed session holds


class PoolSession:
    def __init__(self, card: ModelCard, build: Callable[[], RouterSession]) -> None:
        self.pool = card.pool
        self._model = card.model
        self._build = build
        self._session: RouterSession | None = None
        self._leaving = asyncio.Event()
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
                self._session = self._build()
                await self._session.run()
                return
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
