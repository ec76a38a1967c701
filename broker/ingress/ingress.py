"""One ingress: accepts requests under its lease, is their judge, and hands their tokens to whoever submitted them."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from os import getpid

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.errors import BrokerUnavailable, NoWorker, Overloaded, RequestTooLarge
from headrace.broker.ingress.cancellation import Canceller
from headrace.broker.ingress.inbox import IngressInbox
from headrace.broker.ingress.judge_outbox import JudgeOutbox
from headrace.broker.ingress.open_jobs import OpenJob, OpenJobs
from headrace.broker.ingress.placement_decisions import Decisions
from headrace.broker.ingress.resubmitter import Resubmitter, poison_letter, sorted_history
from headrace.broker.ingress.row_dispatch import RowDispatcher
from headrace.broker.ingress.stream import JobStream
from headrace.broker.ingress.submitter import Submitter
from headrace.broker.jobs import Job
from headrace.broker.membership.members import Members
from headrace.broker.messages import Explanation, IngressMember, JobFault, Since, SinceItem
from headrace.broker.models.directory import ModelDirectory
from headrace.broker.protocol.judge import JobRecord, Judge
from headrace.broker.settings import IngressSettings
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import BrokerStanding, Messaging
from headrace.jetstream.subjects import Subjects

TICK_S = 0.25


class Ingress:
    """Submit jobs, read their streams. `run` must be running."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        ingress_id: str | None = None,
        settings: IngressSettings | None = None,
        frames: Messaging | None = None,
        namespace: str | None = None,
        standing: BrokerStanding | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`frames`: a connection of its own for token frames, where one is worth it. `wall` gives Unix time.

        `namespace`: know only its models; None = those of all. `standing` knows what is wrong with a broker that is
        connected; nothing is accepted while something is.
        """
        self.id = ingress_id or f"i-{secrets.token_hex(6)}"
        self.settings = settings or IngressSettings()
        self._timing = self.settings.timing
        self._messaging = messaging
        self._frames = frames or messaging
        self._standing = standing
        self._subjects = subjects
        self._wall = wall
        self._started = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._draining = False
        self._lapsed = False
        self._open = OpenJobs()
        self._passing = RowDispatcher(self._loop, gather_s=self.settings.gather_s)
        self._outbox = JudgeOutbox(messaging, subjects, self._on_poison)
        self._judge = Judge(self._outbox)
        self._members = Members(messaging, subjects, lease_ttl_s=self._timing.lease_ttl_s)
        self._submitter = Submitter(messaging, subjects, self.settings, standing)
        self._again = Resubmitter(messaging, subjects, self._timing, wall=wall)
        self._ends = Canceller(messaging, subjects, self._judge, self._open, self._members, own=self.id)
        self.models = ModelDirectory(messaging, subjects, self._members, namespace=namespace)
        self._key = subjects.ingress_key(self.id)
        self._lease = LeaseKeeper(
            messaging,
            subjects.bucket("members"),
            self._key,
            encode(IngressMember(ingress=self.id, started=wall(), host=socket.gethostname(), pid=getpid())),
            ttl_s=self._timing.lease_ttl_s,
            on_lapse=self._on_lapse,
            on_gained=self._on_gained,
        )
        self._decisions = Decisions(messaging, subjects)
        self._inbox = IngressInbox(
            messaging,
            subjects,
            self._judge,
            self._outbox,
            self._members,
            self._decisions,
            bucket=subjects.bucket("state"),
            cancel=self._ends.withdraw,
        )
        self._tasks: asyncio.TaskGroup | None = None

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        self._messaging.on_reconnect(self._on_reconnect)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._inbox.tasks = tasks
            await self._frames.subscribe(self._subjects.out(self.id), self._inbox.on_frame)
            await self._messaging.subscribe(self._subjects.control(self.id), self._inbox.on_control)
            await self._messaging.subscribe(self._subjects.events_filter(), self._inbox.on_events)
            tasks.create_task(self._lease.run())
            tasks.create_task(self._members.run())
            tasks.create_task(self.models.run())
            tasks.create_task(self._tick())
            self._started.set()

    async def wait_started(self, timeout_s: float) -> None:
        """Return once requests can be accepted: lease held, members and cards read. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._started.wait()
            await self._members.ready(timeout_s)
            await self.models.ready(timeout_s)
            while not self.ready:
                await asyncio.sleep(0.01)

    @property
    def ready(self) -> bool:
        return not self.trouble

    @property
    def trouble(self) -> str:
        """Why no request can be accepted now, in words for an operator; nothing when one can."""
        if self._draining:
            return "is shutting down"
        if not self._messaging.connected:
            return "has no connection to the broker"
        if self._standing is not None and self._standing.trouble:
            return f"cannot use the broker: {self._standing.trouble}"
        return "" if self._lease.held else "does not hold its lease at the broker"

    @property
    def connected(self) -> bool:
        return self._messaging.connected

    @property
    def open_requests(self) -> int:
        return len(self._judge)

    async def drain(self, grace_s: float) -> None:
        """Accept nothing more, let what is open finish for `grace_s`, then cancel the rest and give up the lease."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + grace_s
        while len(self._judge) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for record in self._judge:
            self._ends.end(record.id, JobFault("cancelled", "the server is shutting down", retriable=True), cause="drain")
        await self._lease.release()

    async def judge_gone(self, ingress: str) -> bool:
        """The verdict that another ingress is dead: a fresh look at its lease. False while it cannot be known."""
        return await self._members.ingress_gone(ingress)

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """Why a request whose job had `explain` was placed where it is; never later than `timeout_s`."""
        return await self._decisions.explain(request_id, timeout_s=timeout_s)

    # -- submit ----------------------------------------------------------------------------------------------

    async def submit(self, job: Job) -> JobStream:
        """Queue a job durably and return its stream.

        Raises NoWorker, Overloaded, BrokerUnavailable or RequestTooLarge; then nothing will run.
        """
        try:
            return await self._submit(job)
        except (NoWorker, Overloaded, BrokerUnavailable, RequestTooLarge) as error:
            metrics.REFUSED.labels(type(error).__name__).inc()
            raise

    async def _submit(self, job: Job) -> JobStream:
        self._admit(job)
        now = self._loop.time()
        wall = self._wall()
        payload = job.payload()
        spill = None
        if len(payload) > self.settings.spill_bytes:
            spill, payload = await self._submitter.spill(job, payload), b""
        body = encode(job.envelope(judge=self.id, now=wall, payload=payload, spill=spill))
        stream = JobStream(
            job.id,
            limit=self.settings.max_rows,
            drained=self._on_drained,
            cancel=self._on_cancel,
            passing=self._passing,
        )
        record = JobRecord(job.id, job.card.pool, job.choices, stream, now)
        if job.explain:
            self._decisions.expect(job.id)
        self._judge.open(record)
        self._open.add(
            OpenJob(job.id, job.card.pool, job.tenant, body, stream, now + job.deadline_s, wall + job.deadline_s, job.name)
        )
        try:
            await self._submitter.publish(job, body)
        except BaseException:
            # Whatever may be stored all the same is dropped by the worker that asks this judge about it.
            self._judge.close(job.id, None)
            self._open.remove(job.id)
            raise
        metrics.submitted(job.card.pool).inc()
        return stream

    def _admit(self, job: Job) -> None:
        if why := self.trouble:
            raise BrokerUnavailable(f"this ingress {why}; try again shortly")
        if len(self._judge) >= self.settings.max_open:
            raise Overloaded(f"{len(self._judge)} requests are open at this ingress", reason="too_many_open")
        if not self._members.having(job.card.pool, job.adapter):
            raise NoWorker(f"model {job.adapter or job.card.model!r} has no ready worker")

    # -- ends ------------------------------------------------------------------------------------------------

    def _on_cancel(self, request_id: str) -> None:
        self._ends.end(request_id, JobFault("cancelled", "the request was cancelled"), cause="client")

    async def cancel(self, name: str, tenant: str, *, timeout_s: float) -> bool:
        """End a request by its id, or by what its client called it, at whichever ingress it is open.

        False when it is nowhere. Raises BrokerUnavailable when some ingress could not be asked and no other one had it.
        """
        return await self._ends.everywhere(name, tenant, timeout_s=timeout_s)

    def _on_drained(self, request_id: str) -> None:
        self._judge.resume_reading(request_id)
        self._outbox.flush()

    def _on_poison(self, record: JobRecord, crashes: int) -> None:
        job = self._open.get(record.id)
        if job is not None and self._tasks is not None:
            letter = poison_letter(job, record, crashes, at=self._wall())
            self._tasks.create_task(self._again.bury(record.pool, record.id, letter))

    # -- time and trouble ------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._forget_ended()
            for job in self._open:
                if now >= job.deadline_s:
                    fault = JobFault("deadline_exceeded", "the request did not finish before its deadline", retriable=True)
                    self._ends.end(job.id, fault, cause="deadline")
                elif job.stream.paused_since_s is not None and now - job.stream.paused_since_s > self.settings.slow_client_s:
                    fault = JobFault("slow_client", "the stream was not read in time")
                    self._ends.end(job.id, fault, cause="slow_client")
            self._ask_after(self._judge.silent(now, self._timing.silence_s), cause="silence")
            metrics.OPEN.set(len(self._judge))

    def _forget_ended(self) -> None:
        for job in self._open:
            if not self._is_open(job.id):
                self._open.remove(job.id)

    def _ask_after(self, records: list[JobRecord], *, cause: str) -> None:
        """Ask the whole pool: a stream may be silent because another worker than the one known here has it."""
        by_pool: dict[str, list[SinceItem]] = {}
        for record in records:
            by_pool.setdefault(record.pool, []).append(record.offsets())
        for pool, items in by_pool.items():
            metrics.GAPS.labels(cause).inc(len(items))
            self._messaging.send(self._subjects.find(pool), encode(Since(items=items)))

    async def _on_reconnect(self) -> None:
        self._ask_after(list(self._judge), cause="reconnect")

    def _on_lapse(self) -> None:
        metrics.LEASE_LAPSES.labels("ingress").inc()
        self._lapsed = True

    def _on_gained(self) -> None:
        """Others may have dropped this ingress's work while it looked dead: every open request is submitted again.

        Only now: a copy that is looked at while there is no lease would be dropped as well.
        """
        if self._lapsed and self._tasks is not None:
            self._lapsed = False
            self.resubmit()

    def resubmit(self) -> None:
        """Submit every open request again, as a new generation: what the broker had stored of them may be gone."""
        if self._tasks is None:
            return
        for record, attempt in self._judge.on_lapse():
            job = self._open.get(record.id)
            if job is not None:
                wanted = partial(self._is_open, record.id)
                self._tasks.create_task(self._again.submit(job, attempt, sorted_history(record), wanted=wanted))

    def _is_open(self, request_id: str) -> bool:
        return self._judge.get(request_id) is not None
