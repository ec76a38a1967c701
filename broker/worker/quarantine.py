"""A worker's part in quarantine: has suspects cleared, and moves what else runs beside them to other workers.

A crash would hit what runs beside a suspect, and its presence would leave open which job the cause was.  Co-runners that do not
end soon are moved as by a drain: another worker continues them after the tokens that they have emitted, and no crash is
counted.  One job is not worth many: they stay where they are unless the load reports of other workers show room for every one
of them, and each of them can be continued.  Then the suspect starts beside them, a little later
(`headrace.broker.protocol.runs`).
"""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, log_ids
from headrace.broker.errors import WireError
from headrace.broker.messages.events import LoadReport
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.worker.presence import Presence
from headrace.broker.worker.runs import WorkerRuns
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message
from headrace.jetstream.tasks import TaskScope

ISOLATION_REASON = "beside_suspects"

log = structlog.get_logger()


def co_runners(table: RunTable) -> list[Run]:
    """List the runs that are in the way of a trial: those that run beside suspects, and those that wait for their end."""
    if not table.on_trial:
        return []
    return [run for run in table if not run.suspect and (run.in_engine or run.state in (RunState.CLAIMING, RunState.WAITING))]


class Quarantine:
    """Looks at the suspects of one worker at each `tick`. Load reports of others are read only while there are any."""

    def __init__(self, deps: WorkerDeps, presence: Presence, runs: WorkerRuns, tasks: TaskScope) -> None:
        """`tasks` runs the waiting for co-runners, which is longer than the period of load reports."""
        self._messaging = deps.messaging
        self._loads = deps.subjects.load_filter(presence.pool)
        self._patience_s = deps.timing.trial_patience_s
        self._presence = presence
        self._runs = runs
        self._tasks = tasks
        self._asking: set[Run] = set()
        self._room: dict[str, int] = {}  # free slots of each other worker
        self._isolating: asyncio.Task[None] | None = None

    def tick(self, now_s: float) -> None:
        table = self._runs.table
        table.alone = not self._others()
        if (self._isolating is None or self._isolating.done()) and co_runners(table):
            self._isolating = self._tasks.spawn(self._isolate())
        for run in table.suspects:
            if run.state is not RunState.RUNNING or not run.made:
                continue
            if run.progress_s is None:
                run.progress_s = now_s
            if now_s - run.progress_s >= run.clear_s and run.ahead and run not in self._asking:
                self._asking.add(run)
                self._tasks.spawn(self._ask(run))

    def _others(self) -> list[str]:
        presence = self._presence
        serving = presence.members.serving_workers(presence.pool)
        return [member.worker for member in serving if member.worker != presence.worker]

    async def _ask(self, run: Run) -> None:
        """Ask the judge, which has seen the same progress and alone decides. It is asked again at the next tick."""
        try:
            reply = await self._runs.judges.suspicion(run)
        finally:
            self._asking.discard(run)
        if reply is None or run.state is not RunState.RUNNING or reply.limit:
            return
        self._runs.table.clear(run)
        metrics.SUSPECTS.labels("cleared").inc()
        log.info("suspect.cleared", **log_ids(run.envelope), attempt=run.attempt, worker=self._presence.worker)
        self._presence.changed()

    async def _isolate(self) -> None:
        worker = self._presence.worker
        self._room.clear()
        try:
            subscription = await self._messaging.subscribe(self._loads, self._on_report)
            try:
                await asyncio.sleep(self._patience_s)
            finally:
                await subscription.unsubscribe()
        except JetStreamError as error:
            log.debug("worker.not_cleared", worker=worker, error=str(error))
            return
        neighbours = co_runners(self._runs.table)
        sequences = sum(run.envelope.choices for run in neighbours)
        room = sum(self._room.get(other, 0) for other in self._others())
        if not neighbours or sequences > room or not all(map(self._movable, neighbours)):
            return
        log.info("worker.cleared", worker=worker, runs=len(neighbours), room=room)
        await asyncio.gather(*(self._runs.move(run, suspect=None, reason=ISOLATION_REASON) for run in neighbours))

    def _movable(self, run: Run) -> bool:
        able = self._presence.members.having(self._presence.pool, run.envelope.adapter)
        there = any(member.worker != self._presence.worker for member in able)
        resumable = run.state is RunState.RUNNING and self._runs.executor.resumable(run)
        return there and (run.state is RunState.WAITING or resumable)

    def _on_report(self, message: Message) -> None:
        try:
            report = decode(LoadReport, message.data)
        except WireError as error:
            metrics.MALFORMED.labels("load").inc()
            log.warning("load.malformed", subject=message.subject, error=str(error))
            return
        if report.worker != self._presence.worker:
            self._room[report.worker] = max(0, report.slots - report.running)
