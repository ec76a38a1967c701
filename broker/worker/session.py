"""The worker's half of the job protocol: constructs the parts of one worker session, wires them, and runs them.

The parts decide what may run and what may be sent; the executor runs it.  Everything happens on one event loop, so the run
table is always consistent between two awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.membership.failure_detector import FailureDetector
from headrace.broker.membership.janitor import Janitor
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Mover
from headrace.broker.messages import WorkerMember
from headrace.broker.prefill.client import PrefillClient
from headrace.broker.prefill.server import PrefillExecutor, PrefillServer
from headrace.broker.worker.consumers import WorkerConsumers
from headrace.broker.worker.frames import FrameSender
from headrace.broker.worker.gone_judges import GoneJudges
from headrace.broker.worker.inbox import JudgeInbox, PrefillInbox, WorkerInbox
from headrace.broker.worker.isolation import IsolationMover
from headrace.broker.worker.janitor_election import JanitorElection
from headrace.broker.worker.judge_client import JudgeClient
from headrace.broker.worker.lapses import Lapses
from headrace.broker.worker.operating.adapters import AdapterChanges
from headrace.broker.worker.operating.drain import Drainer
from headrace.broker.worker.operating.evacuation import Evacuation
from headrace.broker.worker.operating.operations import WorkerOperations
from headrace.broker.worker.operating.operator_commands import AdminInbox, Inspector, OperatorCommands
from headrace.broker.worker.operating.role_change import RoleChange
from headrace.broker.worker.operating.withdrawal import Withdrawal
from headrace.broker.worker.ports import EnginePorts, RunSink
from headrace.broker.worker.preemption import Preemption
from headrace.broker.worker.reports import EventSender, LoadReporter
from headrace.broker.worker.run_admission import RunAdmission, WorkIntake
from headrace.broker.worker.run_lifecycle import RunLifecycle
from headrace.broker.worker.self_placement import SelfPlacer
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker.timers import WorkerTimers
from headrace.broker.worker.token_outbox import TokenOutbox
from headrace.broker.worker.trial import Trial
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Message
from headrace.jetstream.tasks import TaskScope


class WorkerSession:
    """A worker of one pool. Start the engine first: while `run` runs, the worker is registered and takes work.

    `state` is what it holds, `sink` takes what the engine makes of runs, `commands` are those of operators.
    """

    def __init__(self, deps: WorkerDeps, member: WorkerMember, engine: EnginePorts) -> None:
        """`member` is the record that is announced with the lease."""
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
        """Serve until `drain` or `engine_died` is through, or until cancelled."""
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
        """Return once the lease is held. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self._lease.held:
                await asyncio.sleep(0.01)

    @property
    def registered(self) -> bool:
        """The lease is held."""
        return self._lease.held

    async def drain(self, grace_s: float) -> None:
        """Stop taking work, announce it, finish within the grace period, and hand the rest over; then `run` returns."""
        await self._drainer.drain(grace_s)

    async def engine_died(self, why: str, named: Collection[str] = ()) -> None:
        """Move the runs of a dead engine, which count as crashed, or those requests that it has `named`; `run` returns then."""
        await self._drainer.engine_died(why, named)

    async def stop_taking(self) -> None:
        """Withdraw every open pull."""
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
