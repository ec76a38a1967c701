"""The worker's half of the job protocol: pull, claim, start, send frames, settle; resume, lapse, cancel, drain, move.

The session decides what may run and what may be sent; the executor runs it.  Everything here happens on one event loop, so the
run table is always consistent between two awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.membership.failure_detector import FailureDetector
from headrace.broker.membership.janitor import Janitor, rendezvous_first
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Mover
from headrace.broker.messages import Envelope, JobFault, LoadReport, WorkerMember
from headrace.broker.prefill.client import PrefillClient
from headrace.broker.prefill.server import PrefillExecutor, PrefillServer
from headrace.broker.protocol.judge import GENERATION
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable, Tombstones
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.adapters import AdapterChanges
from headrace.broker.worker.drain import Drainer
from headrace.broker.worker.frames import FrameSender
from headrace.broker.worker.inbox import WorkerInbox
from headrace.broker.worker.isolation import IsolationMover
from headrace.broker.worker.judge_client import JudgeClient
from headrace.broker.worker.lapses import Lapses
from headrace.broker.worker.operator_commands import OperatorCommands
from headrace.broker.worker.ports import AdapterPort, Executor, KvPort
from headrace.broker.worker.reports import EventSender, LoadReporter
from headrace.broker.worker.role_change import RoleChange
from headrace.broker.worker.run_admission import RunAdmission
from headrace.broker.worker.self_placement import SelfPlacer
from headrace.broker.worker.timers import WorkerTimers
from headrace.broker.worker.token_outbox import TokenOutbox
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects
from headrace.jetstream.topology import request_consumer, work_consumer

log = structlog.get_logger()

RETURNED_AT_ONCE = 8  # requests that reach a worker which does not serve any (any more), and are moved


class WorkerSession:
    """One worker of one pool. Start the engine first: while `run` runs, the worker is registered and takes work."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        member: WorkerMember,
        executor: Executor,
        *,
        settings: SessionSettings | None = None,
        frames: Messaging | None = None,
        kv: KvPort | None = None,
        prefill: PrefillExecutor | None = None,
        set_role: Callable[[str], Awaitable[None]] | None = None,
        adapters: AdapterPort | None = None,
        wall: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] | None = None,
    ) -> None:
        """`random_bits(64)` makes run ids; `wall` gives Unix time.

        Without `kv` no cache events are published, without `prefill` no prompts are computed for others.  `set_role` has the
        engine change its role, and raises HeadraceError if it cannot.  Without `adapters` these are those of the start.
        """
        self.settings = settings or SessionSettings()
        self.worker = member.worker
        self.pool = member.pool
        self.runs = RunTable()
        self.member = member  # as it is announced; draining and role change
        self._timing = self.settings.timing
        self._messaging = messaging
        self._subjects = subjects
        self._executor = executor
        self._kv = kv
        self._wall = wall
        self._tombstones = Tombstones(keep_s=self._timing.tombstone_s)
        self.members = Members(messaging, subjects, lease_ttl_s=self._timing.lease_ttl_s)
        self._lease = LeaseKeeper(
            messaging,
            subjects.bucket("members"),
            subjects.worker_key(self.pool, self.worker),
            encode(member),
            ttl_s=self._timing.lease_ttl_s,
            on_lapse=self._on_lapse,
            on_gained=self._on_gained,
        )
        self._settling = JudgeClient(messaging, subjects, self.members, self._lease, worker=self.worker, timing=self._timing)
        sender = FrameSender(frames or messaging, subjects, worker=self.worker, max_bytes=self.settings.max_frame_bytes)
        self._out = TokenOutbox(sender, self._lease, executor, parked_tokens=self.settings.parked_tokens)
        # What the runtime and the inbox call. Bound here, so that the token path has no call in between.
        self.append = self._out.append
        self.append_token = self._out.append_token
        self.flush = self._out.flush
        self.fail = self._out.fail
        self.resend = self._out.resend
        self._mover = Mover(messaging, subjects, pool=self.pool, timing=self._timing, wall=wall)
        self._janitor = Janitor(messaging, subjects, self.members, self._mover, pool=self.pool, timing=self._timing)
        self._prober = FailureDetector(
            messaging, subjects, self.members, pool=self.pool, me=self.worker, ttl_s=self._timing.lease_ttl_s
        )
        self._events = EventSender(messaging, subjects, pool=self.pool, worker=self.worker)
        self._placer = SelfPlacer(
            messaging,
            subjects,
            pool=self.pool,
            worker=self.worker,
            timing=self._timing,
            tombstones=self._tombstones,
            burst=self.settings.self_place_burst,
            free_slots=self._free_slots,
            may_place=self._may_place,
            events=self._events,
            elsewhere=self._elsewhere,
            wall=wall,
        )
        self._starting = RunAdmission(
            self,
            messaging,
            subjects,
            self._settling,
            self._mover,
            self._tombstones,
            arrived=self._placer.arrived,
            begin=self._start,
            random_bits=random_bits or random.SystemRandom().getrandbits,
            wall=wall,
        )
        spec = work_consumer(subjects, self.pool, self.worker)
        # A janitor that took this worker for dead has removed its consumer: it is made again when the worker is back.
        self._work = messaging.pull(spec.stream, spec.name, self._starting.on_work, on_missing=self._ensure_consumers)
        self._inbox = WorkerInbox(self, self._tombstones)
        self._load = LoadReporter(
            messaging,
            subjects,
            pool=self.pool,
            worker=self.worker,
            period_s=self._timing.load_period_s,
            gap_s=self._timing.load_gap_s,
            make=self._load_report,
        )
        self._lapses = Lapses(
            self.runs,
            self._settling,
            self._lease,
            executor,
            drop=lambda run, how: self.drop(run, how=how),
            go_on=self._out.go_on,
        )
        self._clearing = IsolationMover(
            messaging,
            subjects,
            self.runs,
            pool=self.pool,
            worker=self.worker,
            patience_s=self._timing.alone_patience_s,
            serving=lambda: [member.worker for member in self.members.serving_workers(self.pool)],
            movable=self._goes_on_elsewhere,
            move=lambda run, reason: self.move(run, suspect=None, reason=reason),
        )
        self._upkeep = WorkerTimers(
            self, self._out, self._lapses, self._clearing, self._tombstones, timing=self._timing, wall=wall
        )
        self._leaving = Drainer(self, messaging, subjects, self._lease, self._mover, retry_s=self._timing.retry_s)
        self.adapters = AdapterChanges(self, messaging, subjects, self._lease, adapters, timing=self._timing)
        self._role_change = RoleChange(self, self._lease, self._mover, set_role, retry_s=self._timing.retry_s)
        self.operating = OperatorCommands(
            self, self.adapters, self._role_change, kv=kv, drain_grace_s=self.settings.drain_grace_s
        )
        deps = WorkerDeps(messaging=messaging, subjects=subjects, settings=self.settings, wall=wall)
        self.prefill_client = PrefillClient(deps, self.members, pool=self.pool, worker=self.worker)
        self.prefill_server = (
            None
            if prefill is None
            else PrefillServer(
                deps,
                self.members,
                self._lease,
                prefill,
                pool=self.pool,
                worker=self.worker,
                may_take=lambda: self._lease.held and self.taking and not self.member.serves,
            )
        )
        self._tasks: asyncio.TaskGroup | None = None

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `drain` or `engine_died` is through, or until cancelled."""
        await self._ensure_consumers()
        self._messaging.on_reconnect(self._ensure_consumers)
        self.members.on_change(self._on_members)
        await self._messaging.subscribe(self._subjects.control(self.worker), self._inbox.on_control)
        await self._messaging.subscribe(self._subjects.find(self.pool), self._inbox.on_control)
        await self._messaging.subscribe(self._subjects.cancel(self.pool), self._inbox.on_cancel)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = self._starting.tasks = self.operating.tasks = tasks
            serving = [
                tasks.create_task(part)
                for part in (
                    self._lease.run(),
                    self.members.run(),
                    self._work.run(),
                    self._placer.run(),
                    self._janitor.run(self._is_janitor),
                    self._upkeep.extend_claims(),
                    self._upkeep.tick(tasks),
                    self._load.run(),
                    self.prefill_client.run(),
                    self._prober.run(),
                )
            ]
            if self._kv is not None:
                serving.append(tasks.create_task(self._kv.run(lambda: self._lease.held)))
            if self.prefill_server is not None:
                serving.append(tasks.create_task(self.prefill_server.run()))
            await self._leaving.done.wait()
            for task in serving:
                task.cancel()
        with contextlib.suppress(JetStreamError, TimeoutError):
            async with asyncio.timeout(self._timing.rpc_timeout_s):
                await self._lease.release()
                await self._messaging.delete_consumer(self._subjects.stream("WORK"), self._subjects.work_consumer(self.worker))
                if self.prefill_server is not None:
                    await self.prefill_server.forget_consumer()

    async def wait_registered(self, timeout_s: float) -> None:
        """Return once the lease is held. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self._lease.held:
                await asyncio.sleep(0.01)

    async def _ensure_consumers(self) -> None:
        for request_class in REQUEST_CLASSES:
            await self._messaging.ensure_consumer(request_consumer(self._subjects, self.pool, request_class))
        await self._messaging.ensure_consumer(work_consumer(self._subjects, self.pool, self.worker))
        if self.prefill_server is not None and not self.member.serves:
            await self.prefill_server.ensure_consumers()

    @property
    def retry_s(self) -> float:
        return self._timing.retry_s

    @property
    def engine_dead(self) -> bool:
        return self._leaving.engine_dead

    @property
    def registered(self) -> bool:
        """The lease is held."""
        return self._lease.held

    @property
    def draining(self) -> bool:
        return self._leaving.announced

    @property
    def taking(self) -> bool:
        """New work is taken: the worker does not leave and does not change its role."""
        return not self._leaving.announced and not self._role_change.running

    async def drain(self, grace_s: float) -> None:
        """Stop taking work, announce it, finish what runs within the grace period, hand the rest over; then `run` returns."""
        await self._leaving.drain(grace_s)

    async def engine_died(self, why: str) -> None:
        """The engine is gone: its runs are moved (and count as crashed), then `run` returns."""
        await self._leaving.engine_died(why)

    async def stop_taking(self) -> None:
        """Withdraw every open pull."""
        self.balance()
        await self._work.stop()
        await self._placer.stop()

    def reply(self, subject: str, data: bytes) -> None:
        if subject:
            self._messaging.send(subject, data)

    # -- credit ----------------------------------------------------------------------------------------------

    def _free_slots(self) -> int:
        if self.runs.any_alone:
            return 0
        return self.settings.slots - self.runs.sequences

    def _may_place(self) -> bool:
        return (
            self.settings.self_place
            and self._lease.held
            and self.taking
            and self.member.serves
            and not self.members.has_router(self.pool)
        )

    def _elsewhere(self, envelope: Envelope) -> str:
        """Who can run this, where this worker lacks the adapter; empty: it has it, or must say itself that nobody has."""
        if self.adapters.usable(envelope.adapter):
            return ""
        having = self.members.having(self.pool, envelope.adapter)
        return rendezvous_first(envelope.id, [m.worker for m in having if m.worker != self.worker]) or ""

    def balance(self) -> None:
        """Ask for as much work as there is room for."""
        wanted = max(0, self._free_slots()) if self._lease.held and self.taking else 0
        if not self.member.serves:
            wanted = min(wanted, RETURNED_AT_ONCE)
        if self._work.credit != wanted:
            self._work.add_credit(wanted - self._work.credit)
        self._placer.balance()
        if self.prefill_server is not None:
            self.prefill_server.balance()
        self._load.changed()

    def _on_members(self) -> None:
        self.balance()
        self._janitor.wake()

    def _is_janitor(self) -> bool:
        """With no router, the rendezvous-first live worker moves what has no owner."""
        if not self._lease.held or self.members.has_router(self.pool):
            return False
        ready = self.members.ready_workers(self.pool)
        # One that has just started may not call anybody gone yet; should clocks differ, two act, which does no harm.
        before = self._wall() - self._timing.lease_ttl_s
        able = [member.worker for member in ready if member.started <= before] or [member.worker for member in ready]
        return rendezvous_first(self.pool, able or [self.worker]) == self.worker

    # -- progress -------------------------------------------------------------------------------------------

    def _start(self, run: Run, payload: bytes) -> None:
        run.start()
        log.debug("run.started", request_id=run.id, attempt=run.attempt, worker=self.worker)
        self._events.add("started", run.id, run.attempt, run.envelope.tokens)
        self._executor.start(run, payload)

    def prefilled(self, run: Run, uncached: int) -> None:
        """Its first token is there; `uncached` prompt tokens had to be computed for it."""
        self._events.add("prefilled", run.id, run.attempt, run.envelope.tokens, uncached=uncached)
        self._load.changed()

    # -- leaving this worker -----------------------------------------------------------------------------------

    def retry_elsewhere(self, run: Run, fault: JobFault) -> None:
        """The engine failed on this run in a way another worker may not: move it."""
        if run.attempt % GENERATION >= self.settings.max_attempts:
            self.fail(run, fault)
        elif self._tasks is not None and run.state in (RunState.RUNNING, RunState.LAPSED, RunState.CLAIMING):
            log.warning("run.retried_elsewhere", request_id=run.id, attempt=run.attempt, code=fault.code, why=fault.message)
            self._tasks.create_task(self.move(run, suspect=None, reason=fault.code))

    async def move(self, run: Run, *, suspect: str | None, reason: str) -> None:
        """Stop a run here and give its message to the next attempt."""
        if run.stopping:
            return
        run.move()
        self._executor.stop(run)
        await self._mover.move(
            worker=self.worker,
            seq=run.seq,
            data=run.delivery.data,
            headers=run.delivery.headers,
            suspect=suspect,
            reason=reason,
        )
        self._forget(run, "moved")

    def _goes_on_elsewhere(self, run: Run) -> bool:
        able = self.members.having(self.pool, run.envelope.adapter)
        there = any(member.worker != self.worker for member in able)
        return there and run.state is RunState.RUNNING and self._executor.resumable(run)

    # -- settle ----------------------------------------------------------------------------------------------

    def drop(self, run: Run, *, how: str) -> None:
        """Stop a run, whatever it is doing, and ack this worker's own copy of the message."""
        if run.stopping:
            return
        if run.state is not RunState.WAITING:
            self._executor.stop(run)
        run.delivery.ack()
        self._forget(run, how)

    def abandon(self, run: Run) -> None:
        """Stop a run whose message is no longer stored. No ack: its sequence is another message's now."""
        if run.state is not RunState.WAITING:
            self._executor.stop(run)
        self._forget(run, "displaced")

    def _forget(self, run: Run, how: str) -> None:
        if self.runs.remove(run):
            metrics.settled(how).inc()
            metrics.RUNS.set(len(self.runs))
            self._events.add("settled", run.id, run.attempt, run.made)
            self.balance()

    # -- time and trouble ------------------------------------------------------------------------------------

    def _on_gained(self) -> None:
        self.balance()
        if self._kv is not None:
            self._kv.lease_gained()

    def _on_lapse(self) -> None:
        metrics.LEASE_LAPSES.labels("worker").inc()
        if self._kv is not None:
            self._kv.lease_lapsed()
        self._out.lapsed()
        self._lapses.mark()
        self.balance()

    def _load_report(self, n: int) -> LoadReport:
        return self._executor.load(
            LoadReport(
                worker=self.worker,
                epoch=self.member.epoch,
                n=n,
                at=self._wall(),
                slots=0 if self.runs.any_alone else self.settings.slots,
                running=len(self.runs),
                waiting=0,
            )
        )
