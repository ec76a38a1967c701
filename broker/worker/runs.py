"""Runs of a worker: questions to their judges, life cycle, preemption, and moves off the worker of a suspect."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode, log_ids
from headrace.broker.dead_letters import FailedDeliveries
from headrace.broker.errors import WireError
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Mover
from headrace.broker.messages.control import (
    Check,
    CheckReply,
    Claim,
    ClaimReply,
    Refuse,
    RefuseReply,
    Suspicion,
    SuspicionQuery,
)
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Record
from headrace.broker.protocol.preemption import Yielding, blocks_of, choose, lost_tokens, may_yield
from headrace.broker.protocol.resume import GENERATION
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable, Turn
from headrace.broker.worker.outbox import EventSender, TokenOutbox
from headrace.broker.worker.state import Executor, WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError, NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Delivery, Message
from headrace.jetstream.tasks import TaskScope

PATIENCE = 2.0  # an answer after a silence is waited for so many times as long

log = structlog.get_logger()
Reply = TypeVar("Reply", bound=Record)


class JudgeClient:
    """Asks judges, only while this worker holds its lease."""

    def __init__(self, deps: WorkerDeps, members: Members, lease: LeaseKeeper, *, worker: str) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._members = members
        self._lease = lease
        self._worker = worker

    async def claim(self, run: Run, turn: Turn) -> ClaimReply:
        """Ask for a run, with a promise for it. A judge that is gone counts as one that does not know the request."""
        claim = Claim(
            id=run.id,
            attempt=run.attempt,
            run=run.run,
            worker=self._worker,
            history=run.history,
            group=turn.group,
            beside=turn.beside,
        )
        reply = await self._ask([run], claim, ClaimReply)
        verdict = reply or ClaimReply(verdict="unknown")
        metrics.CLAIMS.labels(verdict.verdict).inc()
        return verdict

    async def suspicion(self, run: Run) -> Suspicion | None:
        """Ask how suspect a job is. None: its judge is gone, or the run is."""
        return await self._ask([run], SuspicionQuery(id=run.id, history=run.history), Suspicion)

    async def refuse(self, run: Run, fault: JobFault) -> None:
        """End a request that has no run. Returns when the judge has given any answer, or is gone."""
        reply = await self._ask([run], Refuse(id=run.id, attempt=run.attempt, fault=fault), RefuseReply)
        log.info("job.refused", **log_ids(run.envelope), code=fault.code, verdict=reply.verdict if reply else "judge gone")

    async def check(self, runs: list[Run]) -> dict[Run, str]:
        check = Check(worker=self._worker, runs=[run.ref for run in runs])
        while True:
            reply = await self._ask(runs, check, CheckReply)
            if reply is None:
                return dict.fromkeys(runs, "unknown")
            if len(reply.verdicts) == len(runs):
                return dict(zip(runs, reply.verdicts, strict=True))
            metrics.MALFORMED.labels("reply").inc()
            log.error("check.malformed", judge=runs[0].judge, asked=len(runs), answered=len(reply.verdicts))
            await asyncio.sleep(self._timing.retry_s)

    async def _ask(self, runs: list[Run], question: Record, kind: type[Reply]) -> Reply | None:
        """Ask the judge of these runs. None when it is gone, or when all of them were dropped meanwhile.

        After a silence the next answer is waited for twice as long, up to the TTL of a lease. One that takes longer than a
        fixed time, there and back and for what the judge reads before, would never be heard.
        """
        judge, timeout_s = runs[0].judge, self._timing.rpc_timeout_s
        subject = self._subjects.judge(judge)
        data = encode(question)
        while not all(run.gone for run in runs):
            if not self._lease.held:
                await asyncio.sleep(self._timing.retry_s)
                continue
            try:
                answer = await self._messaging.request(subject, data, timeout_s=timeout_s)
                return decode(kind, answer)
            except RequestTimeout as error:
                timeout_s = min(PATIENCE * timeout_s, max(self._timing.lease_ttl_s, self._timing.rpc_timeout_s))
                log.debug("judge.silent", judge=judge, error=str(error))
            except (NoResponder, NotConnected) as error:
                # Silence is a suspicion, never a verdict: work is dropped only when the judge's lease is gone.
                log.debug("judge.silent", judge=judge, error=str(error))
            except WireError as error:
                metrics.MALFORMED.labels("reply").inc()
                log.error("reply.malformed", judge=judge, error=str(error))
            if await self._members.ingress_gone(judge):
                return None
            await asyncio.sleep(self._timing.retry_s)
        return None


# Starts the runs of one worker and takes them off it again: settled, moved to another worker, or displaced.
#
# Every part of the session that stops a run does it here, so each run leaves the table, the engine and the stream together.


class RunLifecycle:
    """The beginning and the end of runs on one worker. Implements `headrace.broker.worker.state.RunSink`."""

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


# The message of a preempted run is moved, as in a drain, to class `rb`: the next attempt resumes from the run's tokens.

REASON = "preempted"
LOOK_S = 0.1
SPARE_PART = 64  # of the KV blocks, one in so many stays free for answers of interactive runs that grow


class Preemption:
    def __init__(self, deps: WorkerDeps, state: WorkerState, executor: Executor, runs: RunLifecycle) -> None:
        self._most_moves = deps.settings.max_preemptions
        self._state = state
        self._executor = executor
        self._runs = runs

    @property
    def slots(self) -> int:
        if not self._state.runs.batch:
            return 0
        return sum(run.envelope.choices for run in self._candidates())

    def yielding(self) -> Yielding:
        found = [run for run in self._candidates() if self._executor.resumable(run)]
        size = self._state.member.block_size
        slots, blocks = sum(run.envelope.choices for run in found), sum(blocks_of(run, size) for run in found)
        return Yielding(len(found), slots, blocks, found)

    def make_room(self, arrived: Run) -> None:
        """Preempt what this new run needs. To be called before it is admitted; a batch run may have to leave itself."""
        if not self._state.runs.batch:
            return
        over = self._state.runs.sequences - self._state.slots
        if over > 0:
            over -= sum(run.envelope.choices for run in self._state.runs if run.stopping or run.state is RunState.ENDED)
        self._preempt(slots=over, blocks=0 if arrived.yields_place else self._missing_blocks(arrived))

    async def run(self) -> None:
        """Keep some KV blocks free beside interactive runs, until cancelled: one batch run at a time makes way for them."""
        while True:
            await asyncio.sleep(LOOK_S)
            runs = self._state.runs
            if runs.batch and len(runs) > len(runs.batch):
                load = self._load()
                if load.blocks_total and load.blocks_total - load.blocks_used < load.blocks_total // SPARE_PART:
                    self._preempt(slots=0, blocks=1)

    def _candidates(self) -> list[Run]:
        state = self._state
        if not state.runs.batch or not state.taking or state.runs.on_trial:
            return []
        return [run for run in state.runs.batch if may_yield(run, self._most_moves)]

    def _missing_blocks(self, run: Run) -> int:
        load, size = self._load(), self._state.member.block_size
        if not load.blocks_total or not size:
            return 0
        return blocks_of(run, size) + 1 - (load.blocks_total - load.blocks_used)

    def _load(self) -> LoadReport:
        state = self._state
        return self._executor.load(
            LoadReport(worker=state.worker, epoch=state.member.epoch, n=0, at=0.0, slots=0, running=0, waiting=0)
        )

    def _preempt(self, *, slots: int, blocks: int) -> None:
        if slots <= 0 and blocks <= 0:
            return
        size = self._state.member.block_size
        for run in choose(self._candidates(), slots=slots, blocks=blocks, block_size=size, resumable=self._executor.resumable):
            lost = lost_tokens(run)
            log.info("run.preempted", **log_ids(run.envelope), attempt=run.attempt, tokens=run.made, lost=lost)
            metrics.PREEMPTED.inc()
            metrics.PREEMPTED_TOKENS.inc(lost)
            self._runs.move_soon(run, reason=REASON)


# Isolation of suspects: what else runs on their worker is moved to other workers, if all of it fits there.
#
# A crash would hit it, and its presence would leave open which job the cause was. Co-runners that do not end soon are moved
# as by a drain: another worker continues them after the tokens that they have emitted, and no crash is counted. One job is
# not worth many: they stay where they are unless the load reports of other workers show room for every one of them, and each
# of them can be continued. Then the suspect starts beside them, a little later (`headrace.broker.protocol.runs`).

ISOLATION_REASON = "beside_suspects"


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
        await asyncio.gather(*(self._runs.move(run, suspect=None, reason=ISOLATION_REASON) for run in neighbours))

    def _movable(self, run: Run) -> bool:
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
