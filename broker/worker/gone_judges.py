"""Drops the runs of judges that are gone, because no client waits for their tokens."""

from __future__ import annotations

from headrace.broker.failed_deliveries import note_failure
from headrace.broker.membership.members import Members
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.tasks import TaskScope


class GoneJudges:
    """Looks for absent judges every `silence_s`, and drops their runs after a fresh read of their lease."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, members: Members, runs: RunLifecycle, tasks: TaskScope) -> None:
        """Leases are read in `tasks`."""
        self._every_s = deps.timing.silence_s
        self._state = state
        self._members = members
        self._runs = runs
        self._tasks = tasks
        self._looked_s = 0.0

    def tick(self, now_s: float) -> None:
        """Look for judges without a lease, if it is time. To be called at every tick."""
        if now_s < self._looked_s + self._every_s:
            return
        self._looked_s = now_s
        for judge in {run.judge: None for run in self._state.runs if not self._members.ingress_live(run.judge)}:
            self._tasks.spawn_guarded(self._drop_if_gone(judge), lambda error: note_failure("judge", error))

    async def _drop_if_gone(self, judge: str) -> None:
        runs = [run for run in self._state.runs if run.judge == judge]  # not those that come while the lease is read
        if await self._members.ingress_gone(judge):
            for run in runs:
                self._runs.drop(run, how="judge_gone")
