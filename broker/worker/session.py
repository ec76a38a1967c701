"""The worker's half of the job protocol: constructs the parts of one worker session, wires them, and runs them.

The parts decide what may run and what may be sent; the executor runs it.  Everything happens on one event loop, so the run
table is always consistent between two awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode, log_ids
from headrace.broker.dead_letters import note_failure
from headrace.broker.errors import unfinished
from headrace.broker.membership.failure_detector import FailureDetector
from headrace.broker.membership.janitor import Janitor, rendezvous_first
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Mover
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.members import WorkerMember
from headrace.broker.prefill_client import PrefillClient
from headrace.broker.prefill_server import PrefillExecutor, PrefillServer
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.drain import AdapterChanges, Drainer, Evacuation, RoleChange, Withdrawal
from headrace.broker.worker.inbox import JudgeInbox, PrefillInbox, WorkerInbox
from headrace.broker.worker.operations import AdminInbox, Inspector, OperatorCommands, WorkerOperations
from headrace.broker.worker.outbox import EventSender, FrameSender, LoadReporter, TokenOutbox
from headrace.broker.worker.run_admission import RunAdmission, WorkIntake
from headrace.broker.worker.runs import IsolationMover, JudgeClient, Preemption, RunLifecycle
from headrace.broker.worker.self_placement import SelfPlacer
from headrace.broker.worker.state import EnginePorts, RunSink, WorkerConsumers, WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Message
from headrace.jetstream.tasks import TaskScope


class Lapses:
    """Handles lease expiry: marks runs when the lease is lost, and asks their judges once it is back, one question per judge.

    A run of that time sends nothing until its judge has confirmed that it is current.
    """

    def __init__(
        self,
        state: WorkerState,
        judges: JudgeClient,
        lease: LeaseKeeper,
        outbox: TokenOutbox,
        runs: RunLifecycle,
        tasks: TaskScope,
    ) -> None:
        self._state = state
        self._judges = judges
        self._lease = lease
        self._outbox = outbox
        self._runs = runs
        self._tasks = tasks
        self._asking: set[Run] = set()

    def mark(self) -> None:
        for run in self._state.runs:
            if run.state in (RunState.RUNNING, RunState.ENDED):
                run.lapse()

    def recheck(self) -> None:
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


class GoneJudges:
    """Looks for absent judges every `silence_s`, and drops their runs after a fresh read of their lease."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, members: Members, runs: RunLifecycle, tasks: TaskScope) -> None:
        self._every_s = deps.timing.silence_s
        self._state = state
        self._members = members
        self._runs = runs
        self._tasks = tasks
        self._looked_s = 0.0

    def tick(self, now_s: float) -> None:
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


log = structlog.get_logger()


class Trial:
    def __init__(self, state: WorkerState, judges: JudgeClient, isolation: IsolationMover, tasks: TaskScope) -> None:
        self._state = state
        self._judges = judges
        self._isolation = isolation
        self._tasks = tasks
        self._asking: set[Run] = set()

    def tick(self, now_s: float) -> None:
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


TICK_S = 0.1


class WorkerTimers:
    def __init__(
        self,
        deps: WorkerDeps,
        state: WorkerState,
        lease: LeaseKeeper,
        outbox: TokenOutbox,
        lapses: Lapses,
        trial: Trial,
        gone_judges: GoneJudges,
    ) -> None:
        self._timing = deps.timing
        self._wall = deps.wall
        self._state = state
        self._lease = lease
        self._outbox = outbox
        self._lapses = lapses
        self._trial = trial
        self._gone_judges = gone_judges

    async def extend_claims(self) -> None:
        """Extend the claims on all stored messages three times per ack wait, while the lease is held, until cancelled."""
        while True:
            await asyncio.sleep(self._timing.ack_wait_s / 3)
            if self._lease.held:
                for run in self._state.runs:
                    run.delivery.progress()

    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._state.tombstones.expire(now)
            self._lapses.recheck()
            if self._lease.held and self._state.taking:
                self._trial.tick(now)
            self._gone_judges.tick(now)
            self._look_at_runs(now)

    def _look_at_runs(self, now_s: float) -> None:
        wall = self._wall()
        for run in self._state.runs:
            if run.state is RunState.ENDED:
                self._outbox.repeat_end(run, now_s, every_s=self._timing.resend_s)
            elif run.state is RunState.RUNNING and run.due_s <= now_s:
                message = unfinished(wall - run.envelope.created, sum(len(choice.ids) for choice in run.choices))
                self._outbox.fail(run, JobFault("deadline_exceeded", message))


class JanitorElection:
    def __init__(self, deps: WorkerDeps, state: WorkerState, lease: LeaseKeeper, members: Members) -> None:
        self._lease_ttl_s = deps.timing.lease_ttl_s
        self._wall = deps.wall
        self._state = state
        self._lease = lease
        self._members = members

    def elected(self) -> bool:
        """Return whether this worker moves ownerless work: it is the rendezvous-first live worker, and there is no router."""
        pool, worker = self._state.pool, self._state.worker
        if not self._lease.held or self._members.has_router(pool):
            return False
        ready = self._members.ready_workers(pool)
        # A worker that has just started may not call others gone yet; if clocks differ, two act, which does no harm.
        before = self._wall() - self._lease_ttl_s
        able = [member.worker for member in ready if member.started <= before] or [member.worker for member in ready]
        return rendezvous_first(pool, able or [worker]) == worker


class WorkerSession:
    """A worker of one pool. Start the engine first: while `run` runs, the worker is registered and takes work.

    `state` is what it holds, `sink` takes what the engine makes of runs, `commands` are those of operators.
    """

    def __init__(self, deps: WorkerDeps, member: WorkerMember, engine: EnginePorts) -> None:
        self._deps, self._kv, executor = deps, engine.kv, engine.executor
        tasks = self._tasks = TaskScope()
        state = self.state = WorkerState(member, slots=deps.settings.slots, tombstone_s=deps.timing.tombstone_s)
        lease = self._lease = self._make_lease()
        members = self.members = self._make_members()
        mover = Mover(deps.messaging, deps.subjects, pool=state.pool, timing=deps.timing, wall=deps.wall)
        self._janitor = Janitor(deps.messaging, deps.subjects, members, mover, pool=state.pool, timing=deps.timing)
        self._election = JanitorElection(deps, state, lease, members)
        self._failure_detector = self._make_failure_detector()
        outbox = self._outbox = self._make_outbox(engine)
        events = EventSender(deps, state)
        runs = RunLifecycle(deps, state, executor, outbox, mover, events, tasks)
        self.sink: RunSink = runs
        self.prefill_client = PrefillClient(deps, members, pool=state.pool, worker=state.worker)
        prefill = self.prefill_server = self._make_prefill_server(engine.prefill)
        judges = JudgeClient(deps, members, lease, worker=state.worker)
        preemption = self._preemption = Preemption(deps, state, executor, runs)
        self._consumers = WorkerConsumers(deps, state, prefill)
        admission = RunAdmission(deps, state, members, judges, runs, tasks)
        self._intake = WorkIntake(deps, state, lease, admission, runs, preemption, self._consumers)
        self.self_placer = SelfPlacer(deps, state, lease, members, events, preemption)
        self._load = LoadReporter(deps, state, executor, preemption.yielding)
        self._lapses = Lapses(state, judges, lease, outbox, runs, tasks)
        trial = Trial(state, judges, IsolationMover(deps, state, members, executor, runs, tasks), tasks)
        gone_judges = GoneJudges(deps, state, members, runs, tasks)
        self._timers = WorkerTimers(deps, state, lease, outbox, self._lapses, trial, gone_judges)
        self._drainer = Drainer(deps, state, lease, mover, runs, prefill, stop_taking=self.stop_taking)
        withdrawal = Withdrawal(deps, state, lease, runs, Evacuation(state, mover, runs, prefill))
        role_change = RoleChange(state, withdrawal, set_role=engine.set_role)
        adapters = AdapterChanges(deps, state, lease, runs, engine.adapters)
        self.commands = OperatorCommands(deps, state, self._drainer, role_change, adapters, tasks)
        self._admin_inbox = AdminInbox(deps, state, WorkerOperations(deps, state, withdrawal, engine.operations), tasks)
        self._judge_inbox = JudgeInbox(state, runs, outbox)
        prefill_inbox = PrefillInbox(self.prefill_client, prefill)
        inspector = Inspector(state, lease, engine.kv, prefill)
        self._inbox = WorkerInbox(deps, state, self._judge_inbox, prefill_inbox, self.commands, inspector, engine.encode)
        self._subscribe_to_changes()

    def _make_lease(self) -> LeaseKeeper:
        deps, state = self._deps, self.state
        return LeaseKeeper(
            deps.messaging,
            deps.subjects.bucket("members"),
            deps.subjects.worker_key(state.pool, state.worker),
            encode(state.member),
            ttl_s=deps.timing.lease_ttl_s,
            on_change=self._on_lease,
        )

    def _make_members(self) -> Members:
        deps, timing = self._deps, self._deps.timing
        return Members(deps.messaging, deps.subjects, lease_ttl_s=timing.lease_ttl_s, overdue_s=timing.overdue_s)

    def _make_failure_detector(self) -> FailureDetector:
        deps, state = self._deps, self.state
        ttl_s = deps.timing.lease_ttl_s
        return FailureDetector(deps.messaging, deps.subjects, self.members, pool=state.pool, me=state.worker, ttl_s=ttl_s)

    def _make_outbox(self, engine: EnginePorts) -> TokenOutbox:
        deps, settings = self._deps, self._deps.settings
        connection = deps.frames or deps.messaging
        frames = FrameSender(connection, deps.subjects, worker=self.state.worker, max_bytes=settings.max_frame_bytes)
        return TokenOutbox(frames, self._lease, engine.executor, parked_tokens=settings.parked_tokens)

    def _make_prefill_server(self, executor: PrefillExecutor | None) -> PrefillServer | None:
        if executor is None:
            return None
        state, lease = self.state, self._lease

        def may_take() -> bool:
            return lease.held and state.taking and not state.member.serves

        return PrefillServer(self._deps, self.members, lease, executor, pool=state.pool, worker=state.worker, may_take=may_take)

    def _subscribe_to_changes(self) -> None:
        self.state.on_change(self._intake.balance)
        self.state.on_change(self.self_placer.balance)
        if self.prefill_server is not None:
            self.state.on_change(self.prefill_server.balance)
        self.state.on_change(self._load.changed)
        self.state.on_load_change(self._load.changed)
        self.members.on_change(self.state.changed)
        self.members.on_change(self._janitor.wake)

    def _on_operator(self, message: Message) -> None:
        if not self._inbox.on_operator(message):
            self._admin_inbox.on_command(message)

    async def run(self) -> None:
        messaging, subjects = self._deps.messaging, self._deps.subjects
        await self._consumers.ensure()
        messaging.on_reconnect(self._consumers.ensure)
        await messaging.subscribe(subjects.own_control(self.state.worker), self._inbox.on_control)
        await messaging.subscribe(subjects.peer(self.state.pool, self.state.worker), self._inbox.on_peer)
        await messaging.subscribe(subjects.operate_worker(self.state.pool, self.state.worker), self._on_operator)
        await messaging.subscribe(subjects.find(self.state.pool), self._inbox.on_control)
        await messaging.subscribe(subjects.cancel(self.state.pool), self._judge_inbox.on_cancel)
        async with self._tasks:
            parts = [
                self._lease.run(),
                self.members.run(),
                self._intake.run(),
                self.self_placer.run(),
                self._janitor.run(self._election.elected),
                self._timers.extend_claims(),
                self._timers.tick(),
                self._preemption.run(),
                self._load.run(),
                self.prefill_client.run(),
            ]
            if self._deps.revokes:
                parts.append(self._failure_detector.run())
            if self._kv is not None:
                parts.append(self._kv.run(lambda: self._lease.held))
            if self.prefill_server is not None:
                parts.append(self.prefill_server.run())
            serving = [self._tasks.spawn(part) for part in parts]
            await self._drainer.done.wait()
            for task in serving:
                task.cancel()
        with contextlib.suppress(JetStreamError, TimeoutError):
            async with asyncio.timeout(self._deps.timing.rpc_timeout_s):
                await self._lease.release()
                await self._consumers.forget()

    async def wait_registered(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not self._lease.held:
                await asyncio.sleep(0.01)

    @property
    def registered(self) -> bool:
        return self._lease.held

    async def drain(self, grace_s: float) -> None:
        """Stop taking work, announce it, finish within the grace period, and hand the rest over; then `run` returns."""
        await self._drainer.drain(grace_s)

    async def engine_died(self, why: str, named: Collection[str] = ()) -> None:
        """Move the runs of a dead engine, which count as crashed, or those requests that it has `named`; `run` returns then."""
        await self._drainer.engine_died(why, named)

    async def stop_taking(self) -> None:
        self.state.changed()
        await self._intake.stop()
        await self.self_placer.stop()

    def _on_lease(self, held: bool) -> None:
        if held:
            self._on_gained()
        else:
            self._on_lapse()

    def _on_gained(self) -> None:
        self.state.changed()
        if self._kv is not None:
            self._kv.lease_gained()

    def _on_lapse(self) -> None:
        metrics.LEASE_LAPSES.labels("worker").inc()
        if self._kv is not None:
            self._kv.lease_lapsed()
        self._outbox.lapsed()
        self._lapses.mark()
        self.state.changed()
