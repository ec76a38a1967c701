"""The runs of one worker: the questions to their judges, their table with its beginnings and ends, and their admission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode, log_ids
from headrace.broker.dead_letters import FailedDeliveries, fault_of_failure, note_failure
from headrace.broker.errors import BrokerError, WireError, missed, unfinished
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
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.protocol.resume import GENERATION
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable, Tombstones, Turn, alone_after_s
from headrace.broker.spill import fetch_payload
from headrace.broker.worker.outbox import TokenOutbox
from headrace.broker.worker.ports import Executor
from headrace.broker.worker.presence import Presence
from headrace.broker.worker.reports import Reports, loads_by_rank
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import NoResponder, NotConnected, RequestTimeout
from headrace.jetstream.ports import Delivery
from headrace.jetstream.tasks import TaskScope

PATIENCE = 2.0  # an answer after a silence is waited for so many times as long
TICK_S = 0.1
TURN_POLL_S = 0.05
RETRY_AFTER_S = 5.0  # told to the client of a request whose adapter no worker has

log = structlog.get_logger()
Reply = TypeVar("Reply", bound=Record)


class JudgeClient:
    """Asks judges, only while this worker holds its lease."""

    def __init__(self, deps: WorkerDeps, presence: Presence) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._presence = presence

    async def claim(self, run: Run, turn: Turn) -> ClaimReply:
        """Ask for a run, with a promise for it. A judge that is gone counts as one that does not know the request."""
        claim = Claim(
            id=run.id,
            attempt=run.attempt,
            run=run.run,
            worker=self._presence.worker,
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
        check = Check(worker=self._presence.worker, runs=[run.ref for run in runs])
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
            if not self._presence.lease.held:
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
            if await self._presence.members.ingress_gone(judge):
                return None
            await asyncio.sleep(self._timing.retry_s)
        return None


class WorkerRuns:
    """The runs of one worker, from their start to their end. The runtime reports to it what the engine makes of them.

    Every part of the session that stops a run does it here, so each run leaves the table, the engine and the stream together.

    * `table`: all that were admitted; `tombstones`: requests that were cancelled lately.
    * `engine_dead`: no run can be started.
    * `adapter_use`: the adapters that were loaded while the worker serves, the least recently used one first.
    """

    def __init__(self, deps: WorkerDeps, presence: Presence, reports: Reports, executor: Executor, tasks: TaskScope) -> None:
        self.slots = deps.settings.slots
        self.table = RunTable()
        self.tombstones = Tombstones(keep_s=deps.timing.tombstone_s)
        self.engine_dead = False
        self.adapter_use: dict[str, None] = {}
        self.judges = JudgeClient(deps, presence)
        self.executor = executor
        self._deps = deps
        self._presence = presence
        self._reports = reports
        self._tasks = tasks
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=presence.pool, kind="move", wall=deps.wall)
        self._asking: set[Run] = set()  # lapsed runs whose judges are asked
        self._judges_seen_s = 0.0
        self.outbox = TokenOutbox(deps, presence.lease, self.table, executor, worker=presence.worker)
        self.max_frame_bytes = deps.settings.max_frame_bytes
        # The send path is bound here, so that the token path has no call in between.
        self.append = self.outbox.append
        self.append_token = self.outbox.append_token
        self.flush = self.outbox.flush
        self.fail = self.outbox.fail
        metrics.RUNS.set_function(self.table.__len__)
        presence.on_lapse(self._lapse)

    @property
    def free_slots(self) -> int:
        """Slots that no run holds; on trial those that more suspects may take. Negative: more sequences than slots."""
        table = self.table
        free = self.slots - table.sequences
        return min(free, table.group_limit - len(table.suspects)) if table.on_trial else free

    # -- begin and end -----------------------------------------------------------------------------------------

    def start(self, run: Run, payload: bytes) -> None:
        run.start()
        envelope = run.envelope
        if envelope.adapter in self.adapter_use:
            self.adapter_use[envelope.adapter] = self.adapter_use.pop(envelope.adapter)
        log.debug("run.started", **log_ids(envelope), attempt=run.attempt, worker=self._presence.worker)
        self._reports.add("started", run.id, run.attempt, envelope.tokens, rank=run.rank)
        self.executor.start(run, payload)

    def prefilled(self, run: Run, uncached: int, fetch_ms: int = 0) -> None:
        """Report the first token of a run; `uncached` prompt tokens had to be computed for it.

        `fetch_ms`: how long it waited for blocks that another worker has computed; 0 = there were none.
        """
        tokens = run.envelope.tokens
        self._reports.add("prefilled", run.id, run.attempt, tokens, uncached=uncached, rank=run.rank, fetch_ms=fetch_ms)
        self._reports.load_changed()

    def retry_elsewhere(self, run: Run, fault: JobFault) -> None:
        """Move a run whose fault another worker may avoid. After `max_attempts` of a generation it fails instead."""
        if run.attempt % GENERATION >= self._deps.settings.max_attempts:
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
            self.executor.stop(run)

    async def _move(self, run: Run, *, suspect: str | None, reason: str, group: int = 0) -> None:
        await self._presence.mover.move(
            worker=self._presence.worker,
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
        await self._presence.mover.move(
            worker=self._presence.worker,
            seq=delivery.stream_seq,
            data=delivery.data,
            headers=delivery.headers,
            suspect=None,
            reason="role",
        )
        self._presence.changed()

    def drop(self, run: Run, *, how: str) -> None:
        """Stop a run in any state, and ack this worker's own copy of the message. Nothing to do while it is moved."""
        if run.stopping:
            return
        if run.state is not RunState.WAITING:
            self.executor.stop(run)
        run.delivery.ack()
        self._forget(run, how)

    def abandon(self, run: Run) -> None:
        """Stop a run whose message is no longer stored, and store it again as the next attempt.

        Without an ack: its sequence is another message's now. The judge need not know that the stream was cut short or made
        again; if it does and has submitted the request itself, its attempt has the higher number.
        """
        lost = not run.stopping
        if run.state is not RunState.WAITING:
            self.executor.stop(run)
        self._forget(run, "displaced")
        if lost and self._tasks.is_open:
            again = self._presence.mover.store_again(run.seq, run.delivery.data, run.delivery.headers)
            self._tasks.spawn_guarded(again, lambda error: self._not_moved(run, error))

    def _forget(self, run: Run, how: str) -> None:
        if self.table.remove(run):
            metrics.settled(how).inc()
            self._reports.add("settled", run.id, run.attempt, run.made, rank=run.rank)
            self._presence.changed()

    # -- lapses of the lease -----------------------------------------------------------------------------------

    def _lapse(self) -> None:
        """Let no run send anything until its judge has confirmed that it is current: the lease was lost."""
        self.outbox.lapsed()
        for run in self.table:
            if run.state in (RunState.RUNNING, RunState.ENDED):
                run.lapse()

    def recheck_lapsed(self) -> None:
        """Ask the judges of lapsed runs once the lease is back, one question per judge."""
        if not self._presence.lease.held:
            return
        by_judge: dict[str, list[Run]] = {}
        for run in self.table:
            if run.state is RunState.LAPSED and run not in self._asking:
                by_judge.setdefault(run.judge, []).append(run)
        for runs in by_judge.values():
            self._asking.update(runs)
            self._tasks.spawn(self._recheck(runs))

    async def _recheck(self, runs: list[Run]) -> None:
        try:
            verdicts = await self.judges.check(runs)
        finally:
            self._asking.difference_update(runs)
        if not self._presence.lease.held:
            return  # lapsed again meanwhile: the answer may be old, and the next tick asks anew
        for run, verdict in verdicts.items():
            if run.state is not RunState.LAPSED:
                continue
            if verdict == "current":
                self.outbox.continue_run(run)
            else:
                self.drop(run, how=verdict)

    # -- time --------------------------------------------------------------------------------------------------

    async def extend_claims(self) -> None:
        """Extend the claims on all stored messages three times per ack wait, while the lease is held, until cancelled."""
        while True:
            await asyncio.sleep(self._deps.timing.ack_wait_s / 3)
            if self._presence.lease.held:
                for run in self.table:
                    run.delivery.progress()

    async def tick(self, trial: Callable[[float], None]) -> None:
        """Do what time asks for, until cancelled. `trial` looks at suspects."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self.tombstones.expire(now)
            self.recheck_lapsed()
            if self._presence.lease.held and self._presence.taking:
                trial(now)
            self.look_for_judges(now)
            self._look_at_runs(now)

    def look_for_judges(self, now_s: float) -> None:
        """Look for absent judges every `silence_s`, and drop their runs after a fresh read of their lease."""
        if now_s < self._judges_seen_s + self._deps.timing.silence_s:
            return
        self._judges_seen_s = now_s
        for judge in {run.judge: None for run in self.table if not self._presence.members.ingress_live(run.judge)}:
            self._tasks.spawn_guarded(self._drop_if_gone(judge), lambda error: note_failure("judge", error))

    async def _drop_if_gone(self, judge: str) -> None:
        runs = [run for run in self.table if run.judge == judge]  # not those that come while the lease is read
        if await self._presence.members.ingress_gone(judge):
            for run in runs:
                self.drop(run, how="judge_gone")

    def _look_at_runs(self, now_s: float) -> None:
        wall = self._deps.wall()
        for run in self.table:
            if run.state is RunState.ENDED:
                self.outbox.repeat_end(run, now_s, every_s=self._deps.timing.resend_s)
            elif run.state is RunState.RUNNING and run.due_s <= now_s:
                message = unfinished(wall - run.envelope.created, sum(len(choice.ids) for choice in run.choices))
                self.fail(run, JobFault("deadline_exceeded", message))

    def load_report(self, n: int, yielding: Yielding) -> LoadReport:
        """Make the report number `n`. `yielding` are the batch runs that would make way for interactive work."""
        table, member = self.table, self._presence.member
        suspects = table.suspects
        return self.executor.load(
            LoadReport(
                worker=self._presence.worker,
                epoch=member.epoch,
                n=n,
                at=self._deps.wall(),
                slots=0 if suspects and table.on_trial else self.slots,  # for ordinary jobs
                running=len(table),
                waiting=0,
                suspects=len(suspects),
                limit=table.group_limit if suspects else 0,
                batch=len(table.batch),
                yielding=yielding.runs,
                yielding_blocks=yielding.blocks,
                ranks=loads_by_rank(table, yielding, ranks=member.ranks, block_size=member.block_size),
            )
        )


class Admission:
    """Lets runs start: at once, or after their turn, a claim, and the fetch of a payload."""

    def __init__(self, deps: WorkerDeps, presence: Presence, runs: WorkerRuns, tasks: TaskScope) -> None:
        """Runs that cannot start at once are admitted in `tasks`."""
        self._deps = deps
        self._presence = presence
        self._runs = runs
        self._judges = runs.judges
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=presence.pool, kind="work", wall=deps.wall)

    def admit(self, run: Run) -> None:
        if self._starts_at_once(run):
            run.begin([], [])
            self._runs.start(run, run.envelope.payload)
        else:
            self._tasks.spawn_guarded(self._admit(run), lambda error: self.failed(run, error))

    def failed(self, run: Run, error: Exception) -> None:
        """End a run that cannot be admitted for a reason that no check has foreseen: it must not end the worker."""
        self._failures.bury(run.delivery, error)
        if run.stopping or run.gone:
            return
        try:
            if run.choices:  # it was claimed, so the judge waits for its last frame
                self._runs.fail(run, fault_of_failure(error))
                return
        except Exception as again:
            log.error("run.not_failed", **log_ids(run.envelope), error=str(again))
        self._runs.drop(run, how="failed")

    def _starts_at_once(self, run: Run) -> bool:
        """Return True for a first attempt of a first delivery with nothing to ask: its first token waits for no round trip."""
        return (
            run.attempt == 1
            and run.delivery.num_delivered == 1
            and not run.history
            and run.envelope.spill is None
            and run.id not in self._runs.tombstones
            and run.envelope.deadline > self._deps.wall()
            and self._presence.usable(run.envelope.adapter)
            and self._presence.members.ingress_live(run.judge)
            and self._runs.table.turn(run) is not None
        )

    async def _admit(self, run: Run) -> None:
        if run.id in self._runs.tombstones or await self._presence.members.ingress_gone(run.judge):
            self._runs.drop(run, how="cancelled" if run.id in self._runs.tombstones else "judge_gone")
            return
        if run.envelope.deadline <= self._deps.wall():
            message = missed(self._deps.wall() - run.envelope.created, run.attempt)
            await self._judges.refuse(run, JobFault("deadline_exceeded", message, retriable=True))
            self._runs.drop(run, how="deadline")
            return
        if not await self._take_over(run) or not await self._has_adapter(run):
            return
        try:
            payload = await fetch_payload(
                self._deps.messaging, self._deps.subjects, run.envelope, wanted=lambda: run.state is RunState.CLAIMING
            )
        except BrokerError as error:
            if run.state is RunState.CLAIMING:
                self._runs.fail(run, JobFault("engine_error", str(error)))
            return
        if run.state is RunState.CLAIMING and not self._runs.engine_dead:
            self._runs.start(run, payload)

    async def _has_adapter(self, run: Run) -> bool:
        adapter = run.envelope.adapter
        if self._presence.usable(adapter) or run.state is not RunState.CLAIMING:
            return True
        if self._presence.members.having(self._presence.pool, adapter):
            await self._runs.move(run, suspect=None, reason="adapter")
        else:
            message = f"no ready worker has the adapter {adapter!r}"
            self._runs.fail(run, JobFault("no_worker", message, retriable=True, retry_after_s=RETRY_AFTER_S))
        return False

    async def _take_over(self, run: Run) -> bool:
        """Wait for the run's turn, claim it where that is needed, and open its logs. False if it is not to run here."""
        if run.suspect:  # by the entries of its message, of which some may not count
            await self._weigh(run)
        began_s = self._loop.time()
        while (turn := await self._turn_of(run, began_s)) is not None:
            if run.attempt == 1 and run.delivery.num_delivered == 1:
                run.begin([], [])
                return True
            reply = await self._judges.claim(run, turn)
            if run.state is not RunState.CLAIMING:
                return False
            if reply.verdict not in ("go", "wait"):
                self._runs.drop(run, how=reply.verdict)
                return False
            self._suspect(run, reply)
            if reply.verdict == "go":
                self._note_start(run, turn)
                run.clear_s = reply.clear_s
                run.begin(reply.emitted, reply.finished)
                return True
            run.wait_again()  # the judge knows more than this copy's history, or has to store it first
            await asyncio.sleep(TURN_POLL_S)
        return False

    async def _weigh(self, run: Run) -> None:
        """Ask the judge how suspect this job really is. Until the answer the worker is on trial, if it was not before."""
        reply = await self._judges.suspicion(run)
        if reply is not None and run.state is RunState.WAITING:
            self._suspect(run, reply)

    def _suspect(self, run: Run, reply: ClaimReply | Suspicion) -> None:
        self._runs.table.suspect(run, reply.limit, reply.crashes)
        self._presence.changed()

    def _note_start(self, run: Run, turn: Turn) -> None:
        if run.suspect:
            metrics.SUSPECTS.labels("beside" if turn.beside else "apart").inc()
            log.info(
                "suspect.started",
                **log_ids(run.envelope),
                attempt=run.attempt,
                crashes=run.crashes,
                limit=run.limit,
                beside=turn.beside,
            )

    async def _turn_of(self, run: Run, began_s: float) -> Turn | None:
        """Wait until a waiting run may be claimed, and return the promise for it. None when it is gone, or is moved instead."""
        while run.state is RunState.WAITING:
            alone_s = alone_after_s(run.crashes, self._deps.timing.trial_alone_s)
            limit_s = alone_s if run.limit == 1 else self._deps.timing.trial_group_s
            turn = self._runs.table.turn(run, overdue=self._loop.time() - began_s >= limit_s)
            if turn is not None and self._presence.taking:
                run.claim(beside=turn.beside)
                return turn
            await asyncio.sleep(TURN_POLL_S)
        return None
