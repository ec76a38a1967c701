"""The trial of suspects on one worker: what is in their way is moved, and those that have gone on are cleared."""

from __future__ import annotations

import structlog

from headrace.broker import metrics
from headrace.broker.log_ids import log_ids
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.isolation import IsolationMover
from headrace.broker.worker.judge_client import JudgeClient
from headrace.broker.worker.state import WorkerState
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


class Trial:
    """Watches the suspects of one worker, and lifts the limit of those that their judges have cleared."""

    def __init__(self, state: WorkerState, judges: JudgeClient, isolation: IsolationMover, tasks: TaskScope) -> None:
        """Judges are asked in `tasks`."""
        self._state = state
        self._judges = judges
        self._isolation = isolation
        self._tasks = tasks
        self._asking: set[Run] = set()

    def tick(self, now_s: float) -> None:
        """Look at the suspects. To be called at every tick while the worker takes work under its lease."""
        self._isolation.tick()
        for run in self._state.runs.suspects:
            if run.state is not RunState.RUNNING or not run.made:
                continue
            if run.progress_s is None:
                run.progress_s = now_s
            if now_s - run.progress_s >= run.clear_s and run.ahead and run not in self._asking:
                self._asking.add(run)
                self._tasks.spawn(self._ask(run))

    async def _ask(self, run: Run) -> None:
        """Ask the judge, which has seen the same progress and alone decides. It is asked again at the next tick."""
        try:
            reply = await self._judges.suspicion(run)
        finally:
            self._asking.discard(run)
        if reply is None or run.state is not RunState.RUNNING or reply.limit:
            return
        self._state.runs.clear(run)
        metrics.SUSPECTS.labels("cleared").inc()
        log.info("suspect.cleared", **log_ids(run.envelope), attempt=run.attempt, worker=self._state.worker)
        self._state.changed()
