"""Room for a job in its last life: what runs beside it goes on elsewhere, where there is room for all of it.

Such a job starts only where nothing else runs.  On a busy worker it would wait for the longest of its neighbours, which may
stream for a quarter of an hour, and the worker's other slots would stay empty for as long.  So neighbours that do not end soon
are moved, as by a drain: another worker continues them after the tokens that they have given out, and nobody counts a crash.
One job is not worth many: they stay where they are unless the others' load reports show room for every one of them, and each
of them can be continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import LoadReport
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

REASON = "beside_last_life"


def co_runners(runs: RunTable) -> list[Run]:
    """Those that a job in its last life waits for; none while one of these is in its last life itself: that one may end."""
    if not runs.any_alone:
        return []
    started = [run for run in runs if run.in_engine or run.state is RunState.CLAIMING]
    waits = any(run.alone and run.state is RunState.WAITING for run in runs)
    return started if waits and not any(run.alone for run in started) else []


class IsolationMover:
    """One worker's. Nothing is listened to while nobody waits."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        runs: RunTable,
        *,
        pool: str,
        worker: str,
        patience_s: float,
        serving: Callable[[], Iterable[str]],
        movable: Callable[[Run], bool],
        move: Callable[[Run, str], Awaitable[None]],
    ) -> None:
        """`patience_s`: how long such a job waits for its neighbours, longer than the period of load reports.
        `serving`: workers that take requests. `movable`: another worker could go on with this run."""
        self._messaging = messaging
        self._subject = subjects.load_filter(pool)
        self._runs = runs
        self._worker = worker
        self._patience_s = patience_s
        self._serving = serving
        self._movable = movable
        self._move = move
        self._room: dict[str, int] = {}  # free slots of each other worker
        self._task: asyncio.Task[None] | None = None

    def look(self, tasks: asyncio.TaskGroup) -> None:
        """Called now and then."""
        if (self._task is None or self._task.done()) and co_runners(self._runs):
            self._task = tasks.create_task(self._clear())

    async def _clear(self) -> None:
        self._room.clear()
        try:
            subscription = await self._messaging.subscribe(self._subject, self._on_report)
            try:
                await asyncio.sleep(self._patience_s)
            finally:
                await subscription.unsubscribe()
        except JetStreamError as error:
            log.debug("worker.not_cleared", worker=self._worker, error=str(error))
            return
        neighbours = co_runners(self._runs)
        sequences = sum(run.envelope.choices for run in neighbours)
        room = sum(self._room.get(worker, 0) for worker in self._serving())
        if not neighbours or sequences > room or not all(map(self._movable, neighbours)):
            return
        log.info("worker.cleared", worker=self._worker, runs=len(neighbours), room=room)
        await asyncio.gather(*(self._move(run, REASON) for run in neighbours))

    def _on_report(self, message: Message) -> None:
        try:
            report = decode(LoadReport, message.data)
        except WireError as error:
            metrics.MALFORMED.labels("load").inc()
            log.warning("load.malformed", subject=message.subject, error=str(error))
            return
        if report.worker != self._worker:
            self._room[report.worker] = max(0, report.slots - report.running)
