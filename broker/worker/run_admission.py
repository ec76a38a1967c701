"""Admission of runs: turns the WORK messages of one worker into runs, and claims, waits and fetches before they start."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode_request, log_ids, parse_job_headers, parse_prefill_header
from headrace.broker.dead_letters import FailedDeliveries, dead_letter, fault_of_failure
from headrace.broker.errors import BrokerError, WireError, missed
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import ClaimReply, Suspicion
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import HEADER_KEPT
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import Turn, alone_after_s
from headrace.broker.spill import fetch_payload
from headrace.broker.worker.outbox import choose_rank
from headrace.broker.worker.runs import JudgeClient, Preemption, RunLifecycle
from headrace.broker.worker.state import WorkerConsumers, WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Delivery
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

TURN_POLL_S = 0.05
RETRY_AFTER_S = 5.0  # told to the client of a request whose adapter no worker has
RETURNED_AT_ONCE = 8  # requests that a worker which serves none takes at once, to move them


class RunAdmission:
    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        members: Members,
        judges: JudgeClient,
        runs: RunLifecycle,
        tasks: TaskScope,
    ) -> None:
        """Runs that cannot start at once are admitted in `tasks`."""
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._timing = deps.timing
        self._wall = deps.wall
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._members = members
        self._judges = judges
        self._runs = runs
        self._tasks = tasks
        self._failures = FailedDeliveries(deps.messaging, deps.subjects, pool=state.pool, kind="work", wall=deps.wall)

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
            and run.id not in self._state.tombstones
            and run.envelope.deadline > self._wall()
            and self._state.usable(run.envelope.adapter)
            and self._members.ingress_live(run.judge)
            and self._state.runs.turn(run) is not None
        )

    async def _admit(self, run: Run) -> None:
        if run.id in self._state.tombstones or await self._members.ingress_gone(run.judge):
            self._runs.drop(run, how="cancelled" if run.id in self._state.tombstones else "judge_gone")
            return
        if run.envelope.deadline <= self._wall():
            message = missed(self._wall() - run.envelope.created, run.attempt)
            await self._judges.refuse(run, JobFault("deadline_exceeded", message, retriable=True))
            self._runs.drop(run, how="deadline")
            return
        if not await self._take_over(run) or not await self._has_adapter(run):
            return
        try:
            payload = await fetch_payload(
                self._messaging, self._subjects, run.envelope, wanted=lambda: run.state is RunState.CLAIMING
            )
        except BrokerError as error:
            if run.state is RunState.CLAIMING:
                self._runs.fail(run, JobFault("engine_error", str(error)))
            return
        if run.state is RunState.CLAIMING and not self._state.engine_dead:
            self._runs.start(run, payload)

    async def _has_adapter(self, run: Run) -> bool:
        adapter = run.envelope.adapter
        if self._state.usable(adapter) or run.state is not RunState.CLAIMING:
            return True
        if self._members.having(self._state.pool, adapter):
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
        self._state.runs.suspect(run, reply.limit, reply.crashes)
        self._state.changed()

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
            alone_s = alone_after_s(run.crashes, self._timing.trial_alone_s)
            limit_s = alone_s if run.limit == 1 else self._timing.trial_group_s
            turn = self._state.runs.turn(run, overdue=self._loop.time() - began_s >= limit_s)
            if turn is not None and self._state.taking:
                run.claim(beside=turn.beside)
                return turn
            await asyncio.sleep(TURN_POLL_S)
        return None


class WorkIntake:
    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        lease: LeaseKeeper,
        admission: RunAdmission,
        runs: RunLifecycle,
        preemption: Preemption,
        consumers: WorkerConsumers,
    ) -> None:
        self._deps = deps
        self._state = state
        self._lease = lease
        self._admission = admission
        self._runs = runs
        self._preemption = preemption
        self._due = False
        work = consumers.work
        # A janitor that took this worker for dead has removed its consumer: it is made again when the worker is back.
        failures = FailedDeliveries(deps.messaging, deps.subjects, pool=state.pool, kind="work", wall=deps.wall)
        on_work = failures.guard(self._on_work, after=state.changed)
        self._pull = deps.messaging.pull(work.stream, work.name, on_work, on_missing=consumers.ensure)

    async def run(self) -> None:
        await self._pull.run()

    async def stop(self) -> None:
        await self._pull.stop()

    def balance(self) -> None:
        """Ask for as much work as there is room for, counting the slots of batch runs that would make way.

        Beside batch runs, which are looked at one by one, this is done once per turn of the event loop.
        """
        if not self._state.runs.batch:
            self._balance()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._balance)

    def _balance(self) -> None:
        self._due = False
        taking = self._lease.held and self._state.taking
        wanted = max(0, self._state.free_slots + self._preemption.slots) if taking else 0
        if not self._state.member.serves:
            wanted = min(wanted, RETURNED_AT_ONCE)
        if self._pull.credit != wanted:
            self._pull.add_credit(wanted - self._pull.credit)

    def _on_work(self, delivery: Delivery) -> None:
        state = self._state
        if (old := state.runs.displaced(delivery)) is not None:
            log.warning("work.displaced", **log_ids(old.envelope), seq=old.seq)
            self._runs.abandon(old)
        if state.runs.redelivered(delivery):
            state.changed()
        elif not self._lease.held or not state.taking:
            delivery.nak(self._deps.timing.retry_s)
        elif not state.member.serves:
            self._runs.return_unserved(delivery)
        else:
            if (run := self._read(delivery)) is not None:
                state.runs.add(run)
                metrics.RUNS.set(len(state.runs))
                state.arrived(run.id, run.attempt)
                try:
                    self._preemption.make_room(run)
                    if not run.stopping:
                        self._admission.admit(run)
                except Exception as error:
                    self._admission.failed(run, error)
            state.changed()

    def _read(self, delivery: Delivery) -> Run | None:
        try:
            envelope = decode_request(delivery.data)
            attempt, history = parse_job_headers(delivery.headers)
            decision = parse_prefill_header(delivery.headers)
        except WireError as error:
            deps = self._deps
            metrics.MALFORMED.labels("work").inc()
            log.error("work.malformed", seq=delivery.stream_seq, error=str(error))
            dead_letter(deps.messaging, deps.subjects, self._state.pool, delivery, str(error), wall=deps.wall)
            return None
        run = Run(envelope=envelope, attempt=attempt, history=history, run=self._deps.random_bits(64), delivery=delivery)
        run.prefill = decision
        run.kept = HEADER_KEPT in (delivery.headers or ())
        run.rank = choose_rank(delivery.headers, self._state.runs, ranks=self._state.member.ranks)
        run.due_s = asyncio.get_running_loop().time() + envelope.deadline - self._deps.wall()
        return run
