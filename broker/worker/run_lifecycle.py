"""Starts the runs of one worker and takes them off it again: settled, moved to another worker, or displaced.

Every part of the session that stops a run does it here, so each run leaves the table, the engine and the stream together.
"""

from __future__ import annotations

import structlog

from headrace.broker import metrics
from headrace.broker.failed_deliveries import FailedDeliveries
from headrace.broker.log_ids import log_ids
from headrace.broker.membership.mover import Mover
from headrace.broker.messages import JobFault
from headrace.broker.protocol.resume import GENERATION
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.ports import Executor
from headrace.broker.worker.reports import EventSender
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker.token_outbox import TokenOutbox
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Delivery
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()


class RunLifecycle:
    """The beginning and the end of runs on one worker. Implements `headrace.broker.worker.ports.RunSink`."""

    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        executor: Executor,
        outbox: TokenOutbox,
        mover: Mover,
        events: EventSender,
        tasks: TaskScope,
    ) -> None:
        """Moves that are not awaited run in `tasks`."""
        self._settings = deps.settings
        self._state = state
        self._executor = executor
        self._mover = mover
        self._events = events
        self._tasks = tasks
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=state.pool, kind="move", wall=deps.wall)
        self.max_frame_bytes = deps.settings.max_frame_bytes
        # The send path is bound here, so that the token path has no call in between.
        self.append = outbox.append
        self.append_token = outbox.append_token
        self.flush = outbox.flush
        self.fail = outbox.fail

    def start(self, run: Run, payload: bytes) -> None:
        """Give a run with open logs to the engine."""
        run.start()
        if run.envelope.adapter:
            self._state.adapters_used.used(run.envelope.adapter)
        log.debug("run.started", **log_ids(run.envelope), attempt=run.attempt, worker=self._state.worker)
        self._events.add("started", run.id, run.attempt, run.envelope.tokens, rank=run.rank)
        self._executor.start(run, payload)

    def prefilled(self, run: Run, uncached: int, fetch_ms: int = 0) -> None:
        """Report the first token of a run; `uncached` prompt tokens had to be computed for it.

        `fetch_ms`: how long it waited for blocks that another worker has computed.
        """
        tokens = run.envelope.tokens
        self._events.add("prefilled", run.id, run.attempt, tokens, uncached=uncached, rank=run.rank, fetch_ms=fetch_ms)
        self._state.load_changed()

    def retry_elsewhere(self, run: Run, fault: JobFault) -> None:
        """Move a run whose fault another worker may avoid. After `max_attempts` of a generation it fails instead."""
        if run.attempt % GENERATION >= self._settings.max_attempts:
            self.fail(run, fault)
        elif self._tasks.is_open and run.state in (RunState.RUNNING, RunState.LAPSED, RunState.CLAIMING):
            ids = log_ids(run.envelope)
            log.warning("run.retried_elsewhere", **ids, attempt=run.attempt, code=fault.code, why=fault.message)
            moving = self.move(run, suspect=None, reason=fault.code)
            self._tasks.spawn_guarded(moving, lambda error: self._not_moved(run, error))

    async def move(self, run: Run, *, suspect: str | None, reason: str, group: int = 0) -> None:
        """Stop a run here and give its message to the next attempt.

        `suspect`: the worker that is thought to have crashed, with so many jobs (`group`, 0 = not known).
        """
        if not run.stopping:
            self._stop_to_move(run)
            await self._move(run, suspect=suspect, reason=reason, group=group)

    def move_soon(self, run: Run, *, reason: str) -> None:
        """Stop a run here now, and give its message to the next attempt in the background."""
        if not run.stopping and self._tasks.is_open:
            self._stop_to_move(run)
            moving = self._move(run, suspect=None, reason=reason)
            self._tasks.spawn_guarded(moving, lambda error: self._not_moved(run, error))

    def _stop_to_move(self, run: Run) -> None:
        in_engine = run.state is not RunState.WAITING
        run.move()
        if in_engine:
            self._executor.stop(run)

    async def _move(self, run: Run, *, suspect: str | None, reason: str, group: int = 0) -> None:
        await self._mover.move(
            worker=self._state.worker,
            seq=run.seq,
            data=run.delivery.data,
            headers=run.delivery.headers,
            suspect=suspect,
            reason=reason,
            group=group,
        )
        self._forget(run, "moved")

    def _not_moved(self, run: Run, error: Exception) -> None:
        self._failures.bury(run.delivery, error)
        self._forget(run, "failed")

    def return_unserved(self, delivery: Delivery) -> None:
        """Move a request that was placed here while this worker still served requests, in the background."""
        self._tasks.spawn_guarded(self._return(delivery), lambda error: self._failures.bury(delivery, error))

    async def _return(self, delivery: Delivery) -> None:
        await self._mover.move(
            worker=self._state.worker,
            seq=delivery.stream_seq,
            data=delivery.data,
            headers=delivery.headers,
            suspect=None,
            reason="role",
        )
        self._state.changed()

    def drop(self, run: Run, *, how: str) -> None:
        """Stop a run in any state, and ack this worker's own copy of the message. Nothing to do while it is moved."""
        if run.stopping:
            return
        if run.state is not RunState.WAITING:
            self._executor.stop(run)
        run.delivery.ack()
        self._forget(run, how)

    def abandon(self, run: Run) -> None:
        """Stop a run whose message is no longer stored, and store it again as the next attempt.

        Without an ack: its sequence is another message's now. The judge need not know that the stream was cut short or made
        again; if it does and has submitted the request itself, its attempt has the higher number.
        """
        lost = not run.stopping
        if run.state is not RunState.WAITING:
            self._executor.stop(run)
        self._forget(run, "displaced")
        if lost and self._tasks.is_open:
            again = self._mover.store_again(run.seq, run.delivery.data, run.delivery.headers)
            self._tasks.spawn_guarded(again, lambda error: self._not_moved(run, error))

    def _forget(self, run: Run, how: str) -> None:
        runs = self._state.runs
        if runs.remove(run):
            metrics.settled(how).inc()
            metrics.RUNS.set(len(runs))
            self._events.add("settled", run.id, run.attempt, run.made, rank=run.rank)
            self._state.changed()
