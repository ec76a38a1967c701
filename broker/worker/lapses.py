"""Lapse of the lease: a run of that time sends nothing until its judge has said that it is still current."""

from __future__ import annotations

from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.judge_client import JudgeClient
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker.token_outbox import TokenOutbox
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.tasks import TaskScope


class Lapses:
    """Marks runs when the lease is lost, and asks about them once it is back, one question per judge."""

    def __init__(
        self,
        state: WorkerState,
        judges: JudgeClient,
        lease: LeaseKeeper,
        outbox: TokenOutbox,
        runs: RunLifecycle,
        tasks: TaskScope,
    ) -> None:
        """Questions are asked in `tasks`."""
        self._state = state
        self._judges = judges
        self._lease = lease
        self._outbox = outbox
        self._runs = runs
        self._tasks = tasks
        self._asking: set[Run] = set()

    def mark(self) -> None:
        """Hold back what runs and what has ended: the lease is lost."""
        for run in self._state.runs:
            if run.state in (RunState.RUNNING, RunState.ENDED):
                run.lapse()

    def recheck(self) -> None:
        """Ask about every lapsed run that is not being asked about. To be called at every tick."""
        if not self._lease.held:
            return
        by_judge: dict[str, list[Run]] = {}
        for run in self._state.runs:
            if run.state is RunState.LAPSED and run not in self._asking:
                by_judge.setdefault(run.judge, []).append(run)
        for runs in by_judge.values():
            self._asking.update(runs)
            self._tasks.spawn(self._ask(runs))

    async def _ask(self, runs: list[Run]) -> None:
        try:
            verdicts = await self._judges.check(runs)
        finally:
            self._asking.difference_update(runs)
        if not self._lease.held:
            return  # lapsed again meanwhile: the answer may be old, and the next tick asks anew
        for run, verdict in verdicts.items():
            if run.state is not RunState.LAPSED:
                continue
            if verdict == "current":
                self._outbox.continue_run(run)
            else:
                self._runs.drop(run, how=verdict)
