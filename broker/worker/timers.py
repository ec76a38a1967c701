"""The periodic work of one worker session: extends claims, repeats last frames, ends runs that are too late."""

from __future__ import annotations

import asyncio

from headrace.broker.deadline_texts import unfinished
from headrace.broker.messages import JobFault
from headrace.broker.protocol.run import RunState
from headrace.broker.worker.gone_judges import GoneJudges
from headrace.broker.worker.lapses import Lapses
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker.token_outbox import TokenOutbox
from headrace.broker.worker.trial import Trial
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper

TICK_S = 0.1


class WorkerTimers:
    """The clock of one worker session. Run `extend_claims` and `tick`."""

    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        lease: LeaseKeeper,
        outbox: TokenOutbox,
        lapses: Lapses,
        trial: Trial,
        gone_judges: GoneJudges,
    ) -> None:
        self._timing = deps.timing
        self._wall = deps.wall
        self._state = state
        self._lease = lease
        self._outbox = outbox
        self._lapses = lapses
        self._trial = trial
        self._gone_judges = gone_judges

    async def extend_claims(self) -> None:
        """Extend the claims on all stored messages three times per ack wait, while the lease is held, until cancelled."""
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            if self._lease.held:
                for run in self._state.runs:
                    run.delivery.progress()

    async def tick(self) -> None:
        """Look at everything that has a time limit every `TICK_S`, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._state.tombstones.expire(now)
            self._lapses.recheck()
            if self._lease.held and self._state.taking:
                self._trial.tick(now)
            self._gone_judges.tick(now)
            self._look_at_runs(now)

    def _look_at_runs(self, now_s: float) -> None:
        """Repeat unanswered last frames, and fail running runs whose deadline has passed."""
        wall = self._wall()
        for run in self._state.runs:
            if run.state is RunState.ENDED:
                self._outbox.repeat_end(run, now_s, every_s=self._timing.resend_s)
            elif run.state is RunState.RUNNING and run.due_s <= now_s:
                message = unfinished(wall - run.envelope.created, sum(len(choice.ids) for choice in run.choices))
                self._outbox.fail(run, JobFault("deadline_exceeded", message))
