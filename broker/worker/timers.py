"""What a worker does by the clock: extend its claims, press for confirmations, end what is too late or wanted by nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.broker.messages import JobFault
from headrace.broker.protocol.run import RunState
from headrace.broker.protocol.runs import Tombstones
from headrace.broker.settings import Timing
from headrace.broker.worker.isolation import IsolationMover
from headrace.broker.worker.lapses import Lapses
from headrace.broker.worker.token_outbox import TokenOutbox

if TYPE_CHECKING:
    from headrace.broker.worker.session import WorkerSession

TICK_S = 0.1


class WorkerTimers:
    """The clock of one worker session. Run `extend_claims` and `tick`."""

    def __init__(
        self,
        session: WorkerSession,
        out: TokenOutbox,
        lapses: Lapses,
        clearing: IsolationMover,
        tombstones: Tombstones,
        *,
        timing: Timing,
        wall: Callable[[], float],
    ) -> None:
        self._session = session
        self._out = out
        self._lapses = lapses
        self._clearing = clearing
        self._tombstones = tombstones
        self._timing = timing
        self._wall = wall
        self._judges_looked_s = 0.0

    async def extend_claims(self) -> None:
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            if self._session.registered:
                for run in self._session.runs:
                    run.delivery.progress()

    async def tick(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._tombstones.expire(now)
            self._lapses.recheck(tasks)
            if self._session.registered and self._session.taking:
                self._clearing.look(tasks)
            self._look_for_judges(tasks, now)
            self._look_at_runs(now)

    def _look_at_runs(self, now_s: float) -> None:
        wall = self._wall()
        for run in self._session.runs:
            if run.state is RunState.ENDED:
                self._out.press(run, now_s, every_s=self._timing.resend_s)
            elif run.state is RunState.RUNNING and run.envelope.deadline <= wall:
                self._out.fail(run, JobFault("deadline_exceeded", "the request did not finish before its deadline"))

    def _look_for_judges(self, tasks: asyncio.TaskGroup, now_s: float) -> None:
        """Nobody waits for the tokens of a judge that is gone."""
        if now_s < self._judges_looked_s + self._timing.silence_s:
            return
        self._judges_looked_s = now_s
        members = self._session.members
        for judge in {run.judge: None for run in self._session.runs if not members.ingress_live(run.judge)}:
            tasks.create_task(self._drop_if_gone(judge))

    async def _drop_if_gone(self, judge: str) -> None:
        runs = [run for run in self._session.runs if run.judge == judge]  # not those that come while the answer is on its way
        if await self._session.members.ingress_gone(judge):
            for run in runs:
                self._session.drop(run, how="judge_gone")
