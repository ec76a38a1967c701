"""Wakes sleeping workers of a pool for requests that wait and that no worker in service may take (`wake_on_demand`)."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages import Operated, Wake
from headrace.jetstream.errors import JetStreamError
from headrace.router.placement.wake_choice import worker_to_wake
from headrace.router.session import metrics
from headrace.router.session.deps import RouterDeps
from headrace.router.session.state import RouterState

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
        """Look at the window until cancelled."""
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
