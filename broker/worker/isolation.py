"""Isolation of suspects: what else runs on their worker is moved to other workers, if all of it fits there.

A crash would hit it, and its presence would leave open which job the cause was.  Co-runners that do not end soon are moved as
by a drain: another worker continues them after the tokens that they have emitted, and no crash is counted.  One job is not
worth many: they stay where they are unless the load reports of other workers show room for every one of them, and each of them
can be continued.  Then the suspect starts beside them, a little later (`headrace.broker.protocol.trial`).
"""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.membership.members import Members
from headrace.broker.messages import LoadReport
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.worker.ports import Executor
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

REASON = "beside_suspects"


def co_runners(runs: RunTable) -> list[Run]:
    """List the runs that are in the way of a trial: those that run beside suspects, and those that wait for their end."""
    if not runs.on_trial:
        return []
    return [run for run in runs if not run.suspect and (run.in_engine or run.state in (RunState.CLAIMING, RunState.WAITING))]


class IsolationMover:
    """Moves the co-runners of one worker's suspects. Load reports are read only while there are any."""

    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        members: Members,
        executor: Executor,
        runs: RunLifecycle,
        tasks: TaskScope,
    ) -> None:
        """`tasks` runs the waiting for co-runners, which is longer than the period of load reports."""
        self._messaging = deps.messaging
        self._subject = deps.subjects.load_filter(state.pool)
        self._patience_s = deps.timing.trial_patience_s
        self._state = state
        self._members = members
        self._executor = executor
        self._runs = runs
        self._tasks = tasks
        self._room: dict[str, int] = {}  # free slots of each other worker
        self._task: asyncio.Task[None] | None = None

    def tick(self) -> None:
        """Begin to wait for co-runners, if suspects have any. To be called at every tick."""
        self._state.runs.alone = not any(
            member.worker != self._state.worker for member in self._members.serving_workers(self._state.pool)
        )
        if (self._task is None or self._task.done()) and co_runners(self._state.runs):
            self._task = self._tasks.spawn(self._isolate())

    async def _isolate(self) -> None:
        worker = self._state.worker
        self._room.clear()
        try:
            subscription = await self._messaging.subscribe(self._subject, self._on_report)
            try:
                await asyncio.sleep(self._patience_s)
            finally:
                await subscription.unsubscribe()
        except JetStreamError as error:
            log.debug("worker.not_cleared", worker=worker, error=str(error))
            return
        neighbours = co_runners(self._state.runs)
        sequences = sum(run.envelope.choices for run in neighbours)
        room = sum(self._room.get(member.worker, 0) for member in self._members.serving_workers(self._state.pool))
        if not neighbours or sequences > room or not all(map(self._movable, neighbours)):
            return
        log.info("worker.cleared", worker=worker, runs=len(neighbours), room=room)
        await asyncio.gather(*(self._runs.move(run, suspect=None, reason=REASON) for run in neighbours))

    def _movable(self, run: Run) -> bool:
        """Return True if another worker could continue this run."""
        able = self._members.having(self._state.pool, run.envelope.adapter)
        there = any(member.worker != self._state.worker for member in able)
        return there and (run.state is RunState.WAITING or (run.state is RunState.RUNNING and self._executor.resumable(run)))

    def _on_report(self, message: Message) -> None:
        try:
            report = decode(LoadReport, message.data)
        except WireError as error:
            metrics.MALFORMED.labels("load").inc()
            log.warning("load.malformed", subject=message.subject, error=str(error))
            return
        if report.worker != self._state.worker:
            self._room[report.worker] = max(0, report.slots - report.running)
