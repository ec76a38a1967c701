"""Wakes sleeping workers of a pool for waiting requests that no worker in service may take (`wake_on_demand`)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Protocol

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.operator import Operated, Wake
from headrace.jetstream.errors import JetStreamError
from headrace.router.session import metrics
from headrace.router.session.state import RouterDeps, RouterState

LOOKED_AT = 256  # waiting requests per look; those behind them wait for the next one


class Wants(Protocol):
    """The demands of a waiting request on its worker (`headrace.router.session.state.RequestHead`)."""

    @property
    def adapter(self) -> str: ...
    @property
    def worker(self) -> str: ...
    @property
    def require(self) -> list[str]: ...


def worker_to_wake(
    waiting: Iterable[Wants],
    members: Collection[WorkerMember],
    *,
    asked: Collection[str] = (),
    resting: Collection[str] = (),
) -> str | None:
    """Return the id of the worker to wake; None if none has to be.

    A request that a worker in service may take, or one that is waking or `asked` to, wakes no other.  Among the sleeping ones
    the lightest sleep comes first, then the name, so that all routers of a pool choose the same one.  `resting` are not to be
    woken now.
    """
    serving = [member for member in members if member.serves]
    up = [member for member in serving if member.waking or not member.draining or member.worker in asked]
    asleep = [member for member in serving if member.sleeping and member not in up and member.worker not in resting]
    if not asleep:
        return None
    for wants in islice(waiting, LOOKED_AT):
        if any(_may_take(wants, member) for member in up):
            continue
        able = [member for member in asleep if _may_take(wants, member)]
        if able:
            return min(able, key=lambda member: (member.sleeping, member.worker)).worker
    return None


def _may_take(wants: Wants, member: WorkerMember) -> bool:
    if wants.worker and wants.worker != member.worker:
        return False
    if wants.adapter and wants.adapter not in member.adapters:
        return False
    return not set(wants.require) - set(member.labels)


log = structlog.get_logger()

LOOK_S = 0.1  # how often the window is looked at
ANSWER_S = 1000.0  # a worker may read its weights again and warm up before it answers
REST_S = 10.0  # a worker that could not be woken is left alone for so long


class Waker:
    """Wakes workers while `run` runs. Other routers may choose the same one: a second wake does nothing."""

    def __init__(self, deps: RouterDeps, state: RouterState) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._members = deps.members
        self._pool = deps.pool
        self._state = state
        self._resting: dict[str, float] = {}  # worker → until when

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            asked: dict[str, asyncio.Task[None]] = {}
            while True:
                await asyncio.sleep(LOOK_S)
                if not len(self._state.window) or not self._state.permission.granted:
                    continue
                now = loop.time()
                self._resting = {worker: until_s for worker, until_s in self._resting.items() if until_s > now}
                asked = {worker: task for worker, task in asked.items() if not task.done()}
                waiting = (held.head for held in self._state.window if held.waiting)
                members = self._members.workers(self._pool).values()
                chosen = worker_to_wake(waiting, members, asked=asked, resting=self._resting)
                if chosen is not None:
                    asked[chosen] = tasks.create_task(self._wake(chosen))

    async def _wake(self, worker: str) -> None:
        log.info("worker.waking", worker=worker, pool=self._pool, waiting=len(self._state.window))
        subject = self._subjects.operate_worker(self._pool, worker)
        try:
            answer = decode(Operated, await self._messaging.request(subject, encode(Wake()), timeout_s=ANSWER_S))
            why = "" if answer.ok else answer.message
        except (JetStreamError, WireError) as error:
            why = str(error)
        metrics.WAKES.labels(self._pool, "failed" if why else "woken").inc()
        if why:
            self._resting[worker] = asyncio.get_running_loop().time() + REST_S
            log.warning("worker.not_woken", worker=worker, pool=self._pool, why=why)
        else:
            log.info("worker.woken", worker=worker, pool=self._pool)
