"""An ingress: accepts requests under its lease, judges them, and delivers their tokens to the submitters."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from os import getpid
from typing import Protocol

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.errors import BrokerUnavailable, NoWorker, Overloaded, RequestTooLarge
from headrace.broker.ingress.inbox import ClaimDecider, IngressInbox
from headrace.broker.ingress.requests import JudgeOutbox, OpenRequest, OpenRequests, RequestOwner
from headrace.broker.ingress.spill_store import SpillStore
from headrace.broker.ingress.stream import JobStream, RowDispatcher
from headrace.broker.ingress.submission import Submission
from headrace.broker.ingress.timeline import Timelines, explain
from headrace.broker.ingress.waits import BrokerWait, WorkerWait
from headrace.broker.jobs import Job
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import Explanation
from headrace.broker.messages.events import Refused
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.members import IngressMember
from headrace.broker.models.directory import ModelDirectory
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.resume import CrashRecorder, Resume
from headrace.broker.settings import IngressSettings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import HealthPort, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope


class JobRunnerPort(Protocol):
    """`headrace.broker.durable.carrier.Carrier`, which lies above."""

    def on_lease(self, held: bool) -> None: ...

    def carries(self, job: str, nonce: str) -> bool: ...


class Ingress:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        *,
        ingress_id: str | None = None,
        settings: IngressSettings | None = None,
        namespace: str | None = None,
        health: HealthPort | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`namespace`: serve only the models in it; None serves those of all namespaces. `wall` gives Unix time.

        `health` knows what is wrong with a broker that is connected; no request is accepted while something is.
        """
        self.id = ingress_id or f"i-{secrets.token_hex(6)}"
        self.settings = settings or IngressSettings()
        timing = self.settings.timing
        self._messaging = messaging
        self._subjects = subjects
        self._health = health
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._started = asyncio.Event()
        self._draining = False
        self._job_runner: JobRunnerPort | None = None
        self._tasks = TaskScope()

        self._members = Members(messaging, subjects, lease_ttl_s=timing.lease_ttl_s)
        self._timelines = Timelines(self.id)
        sealed = self.settings.seals
        self._spills = SpillStore(messaging, subjects, self._members, self._tasks, ingress=self.id, sealed=sealed, wall=wall)
        self._requests = OpenRequests(self._timelines, self._spills)
        outbox = JudgeOutbox(messaging, subjects, self._requests, self._tasks, retry_s=timing.retry_s, wall=wall)
        self._judge = Judge(outbox)
        self._owner = RequestOwner(
            messaging,
            subjects,
            self._judge,
            outbox,
            self._requests,
            self._members,
            ingress=self.id,
            settings=self.settings,
        )
        claims = ClaimDecider(messaging, subjects, self._judge, outbox, self._members, self._tasks)
        self._inbox = IngressInbox(self._judge, outbox, self._owner, claims, self._timelines, self._carries)
        self._broker_wait = BrokerWait(self._away, longest_s=self.settings.broker_wait_s)
        self._submission = Submission(
            messaging,
            subjects,
            self._judge,
            self._requests,
            self._broker_wait,
            health,
            self._tasks,
            settings=self.settings,
            wall=wall,
        )
        self._worker_wait = WorkerWait(
            messaging, self._members, self._judge, self._owner, longest_s=self.settings.no_worker_wait_s
        )
        self._dispatcher = RowDispatcher(self._loop, gather_s=self.settings.gather_s)
        key = self.settings.card_key
        self.models = ModelDirectory(messaging, subjects, self._members, namespace=namespace, signed_with=key)
        self._lease = LeaseKeeper(
            messaging,
            subjects.bucket("members"),
            subjects.ingress_key(self.id),
            encode(IngressMember(ingress=self.id, started=wall(), host=socket.gethostname(), pid=getpid())),
            ttl_s=timing.lease_ttl_s,
            on_change=self._on_lease,
        )

    async def run(self) -> None:
        self._messaging.on_reconnect(self._owner.on_reconnect)
        self._messaging.on_reconnect(self._on_reconnect)
        async with self._tasks:
            out, judge, named = self._subjects.out(self.id), self._subjects.judge(self.id), self._subjects.from_workers
            await self._messaging.subscribe(out, self._inbox.on_frame)
            await self._messaging.subscribe(named(out), self._inbox.on_named_frame)
            await self._messaging.subscribe(judge, self._inbox.on_control)
            await self._messaging.subscribe(named(judge), self._inbox.on_named_control)
            await self._messaging.subscribe(self._subjects.events_filter(), self._inbox.on_events)
            self._tasks.spawn(self._lease.run())
            self._tasks.spawn(self._members.run())
            self._tasks.spawn(self.models.run())
            self._tasks.spawn(self._owner.run())
            self._tasks.spawn(self._worker_wait.run())
            self._tasks.spawn(self._spills.run(lambda: self._lease.held))
            self._started.set()

    async def wait_started(self, timeout_s: float) -> None:
        """Return once requests can be accepted: lease held, members and cards read. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._started.wait()
            await self._members.ready(timeout_s)
            await self.models.ready(timeout_s)
            while not self.ready:
                await asyncio.sleep(0.01)

    async def _on_reconnect(self) -> None:
        self._broker_wait.back()

    def _on_lease(self, held: bool) -> None:
        self._broker_wait.back()
        if self._job_runner is not None:
            self._job_runner.on_lease(held)  # before anything is submitted again
        self._submission.on_lease(held)

    def attach(self, job_runner: JobRunnerPort) -> None:
        """Let a job runner of stored jobs follow the lease, and answer whether it carries a job."""
        self._job_runner = job_runner

    def _carries(self, job: str, nonce: str) -> bool:
        return self._job_runner is not None and self._job_runner.carries(job, nonce)

    @property
    def lease_held(self) -> bool:
        return self._lease.held

    @property
    def members(self) -> Members:
        return self._members

    @property
    def ready(self) -> bool:
        return not self.trouble

    @property
    def trouble(self) -> str:
        """The reason why no request can be accepted now, in words for an operator; empty if one can."""
        if self._draining:
            return "is shutting down"
        if not self._messaging.connected:
            return "has no connection to the broker"
        if self._health is not None and self._health.trouble:
            return f"cannot use the broker: {self._health.trouble}"
        return "" if self._lease.held else "does not hold its lease at the broker"

    @property
    def storing(self) -> bool:
        """True unless the broker is known to store no messages; also while it is away for a moment."""
        return self._health is None or not self._health.trouble

    def _away(self) -> bool:
        """Return whether the broker cannot be used now but may be in a moment: it is neither known as unusable nor full."""
        if self._draining:
            return False
        if not self._messaging.connected:
            return True
        return not self._lease.held and self.storing

    @property
    def connected(self) -> bool:
        return self._messaging.connected

    @property
    def open_requests(self) -> int:
        return len(self._judge)

    async def drain(self, grace_s: float) -> None:
        """Accept no more requests, let the open ones finish for `grace_s`, then cancel the rest and give up the lease."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + grace_s
        while len(self._judge) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for record in self._judge:
            self._owner.end(record.id, JobFault("cancelled", "the server is shutting down", retriable=True), cause="drain")
        await self._lease.release()

    async def judge_gone(self, ingress: str) -> bool:
        return await self._members.ingress_gone(ingress)

    def judge_live(self, ingress: str) -> bool:
        return self._members.ingress_live(ingress)

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """Return why a request was placed on its worker. Parts that are not known are left out; nothing is raised."""
        timeline = self._timelines.get(request_id)
        return await explain(timeline, request_id, self._messaging, self._subjects, timeout_s=timeout_s)

    async def submit(self, job: Job, *, resume: Resume | None = None, recorder: CrashRecorder | None = None) -> JobStream:
        """Queue a job durably and return its stream. With `resume` the stream goes on behind what that says was emitted.

        `recorder`: stores the crashes of a stored job before a worker may go on with it.

        While no worker can take it, it waits in the queue, at most `no_worker_wait_s`. Its stream ends as JobRefused then.
        While the broker, the lease or the leader of its stream is away, it waits here, at most `broker_wait_s`.

        Raises NoWorker (if nothing may wait), Overloaded, BrokerUnavailable or RequestTooLarge; the job does not run then.
        """
        try:
            return await self._submit(job, None if resume is None or resume.fresh else resume, recorder)
        except (NoWorker, Overloaded, BrokerUnavailable, RequestTooLarge) as error:
            metrics.REFUSED.labels(type(error).__name__).inc()
            if isinstance(error, NoWorker | Overloaded):  # more workers would have taken it: the planner counts it as demand
                told = Refused(reason=getattr(error, "reason", "no_worker"))
                with contextlib.suppress(JetStreamError):
                    self._messaging.send(self._subjects.refused(job.card.pool), encode(told))
            raise

    async def _submit(self, job: Job, resume: Resume | None, recorder: CrashRecorder | None) -> JobStream:
        now = self._loop.time()
        wall = self._wall()
        trouble = self.trouble
        if trouble and self._away():
            await self._broker_wait.hold(job.deadline_s)
            trouble = self.trouble
        self._admit(job, trouble)
        payload = job.payload()
        spill = None
        if len(payload) > self.settings.spill_bytes:
            settings = self.settings
            keep_s = job.deadline_s + settings.timing.ttl_slack_s
            spill = await self._spills.put(job.id, payload, largest=settings.max_payload_bytes, ttl_s=keep_s)
            payload = b""
        body = encode(job.envelope(judge=self.id, now=wall, payload=payload, spill=spill))
        stream = JobStream(
            job.id,
            limit=self.settings.max_rows,
            owner=self._owner,
            dispatcher=self._dispatcher,
        )
        record = JobRecord(job.id, job.card.pool, job.choices, stream, now)
        record.recorder = recorder
        if resume is not None:
            record.restore(resume)
        self._judge.open(record)
        stream.timeline = self._timelines.begin(job, record, now, wall)
        self._requests.add(
            OpenRequest(job.id, job.card.pool, job.tenant, body, stream, now + job.deadline_s, wall + job.deadline_s, job.name)
        )
        try:
            stored = await self._submission.publish(job, body, resume=resume)
        except BaseException:
            # A request that was stored all the same is dropped by the worker that asks this judge about it.
            self._requests.drop(job.id)
            self._judge.close(job.id, None)
            raise
        metrics.submitted(job.card.pool).inc()
        self._worker_wait.hold(job, stored, now)
        return stream

    def _admit(self, job: Job, trouble: str) -> None:
        if trouble:
            raise BrokerUnavailable(f"this ingress {trouble}; try again shortly")
        if len(self._judge) >= self.settings.max_open:
            raise Overloaded(f"{len(self._judge)} requests are open at this ingress", reason="too_many_open")
        if not self._worker_wait.longest_s and not self._worker_wait.answerable(job):
            raise NoWorker(f"model {job.adapter or job.card.model!r} has no ready worker")

    async def cancel(self, name: str, tenant: str, *, timeout_s: float) -> bool:
        """End a request by its id, or by its client's name for it, at the ingress where it is open.

        Returns False if it is open nowhere. Raises BrokerUnavailable if some ingress could not be asked and no other one had
        the request.
        """
        return await self._owner.cancel(name, tenant, timeout_s=timeout_s)

    def resubmit(self) -> None:
        self._submission.resubmit()
