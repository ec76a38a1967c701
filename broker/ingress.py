"""One ingress: accepts requests under its lease, is their judge, and hands their tokens to whoever submitted them."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import time
from collections.abc import Callable
from os import getpid

import structlog

from broker import metrics
from broker.codec import decode, encode, job_headers
from broker.errors import BrokerUnavailable, NoWorker, Overloaded, RequestTooLarge, WireError
from broker.explaining import Decisions
from broker.ingress_inbox import IngressInbox
from broker.jobs import Job
from broker.members import Members
from broker.messages import (
    Cancel,
    CancelJob,
    DeadLetter,
    Done,
    Explanation,
    HistoryEntry,
    IngressMember,
    JobFault,
    Since,
    SinceItem,
    Spill,
)
from broker.models import ModelDirectory
from broker.moving import message_ttl_s
from broker.open_jobs import OpenJob, OpenJobs
from broker.outbox import JudgeOutbox
from broker.protocol.judge import JobRecord, Judge
from broker.settings import IngressSettings
from broker.spill import sha256_hex
from broker.stream import JobStream
from jetstream.errors import JetStreamError, NoResponder, PayloadTooLarge, PublishUnknown, QueueFull
from jetstream.lease import LeaseKeeper
from jetstream.ports import BrokerStanding, Messaging
from jetstream.subjects import Subjects

log = structlog.get_logger()

TICK_S = 0.25
SUBMIT_TRIES = 3
QUEUE_FULL_RETRY_AFTER_S = 1.0


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
        self._cancels: dict[str, list[str]] = {}
        self._outbox = JudgeOutbox(messaging, subjects, self._on_poison)
        self._judge = Judge(self._outbox)
        self._members = Members(messaging, subjects, lease_ttl_s=self._timing.lease_ttl_s)
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
            cancel=self._withdraw,
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
            self._end(record.id, JobFault("cancelled", "the server is shutting down", retriable=True), cause="drain")
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
            spill, payload = await self._spill(job, payload), b""
        body = encode(job.envelope(judge=self.id, now=wall, payload=payload, spill=spill))
        stream = JobStream(
            job.id, limit=self.settings.max_rows, drained=self._on_drained, cancel=lambda i: self._cancel(i, "client")
        )
        record = JobRecord(job.id, job.card.pool, job.choices, stream, now)
        if job.explain:
            self._decisions.expect(job.id)
        self._judge.open(record)
        self._open.add(
            OpenJob(job.id, job.card.pool, job.tenant, body, stream, now + job.deadline_s, wall + job.deadline_s, job.name)
        )
        try:
            await self._publish_first(job, body)
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

    async def _spill(self, job: Job, payload: bytes) -> Spill:
        if len(payload) > self.settings.max_payload_bytes:
            raise RequestTooLarge(f"the request takes {len(payload)} bytes; the limit is {self.settings.max_payload_bytes}")
        try:
            await self._messaging.objects(self._subjects.bucket("spill")).put(job.id, payload)
        except JetStreamError as error:
            raise BrokerUnavailable(f"a large request could not be stored: {error}") from error
        return Spill(object=job.id, size=len(payload), digest=await sha256_hex(payload))

    async def _publish_first(self, job: Job, body: bytes) -> None:
        subject = self._subjects.req(job.card.pool, job.request_class, job.tenant)
        started = self._loop.time()
        for attempt in range(SUBMIT_TRIES):
            try:
                await self._messaging.publish(
                    subject,
                    body,
                    msg_id=f"{job.id}.1",
                    ttl_s=job.deadline_s + self._timing.ttl_slack_s,
                    timeout_s=self._timing.publish_timeout_s,
                )
            except PublishUnknown as error:  # the same id again: stored twice would be harmless, not at all would not
                if attempt + 1 == SUBMIT_TRIES:
                    self._note(error)
                    raise BrokerUnavailable("the broker does not confirm the request; try again shortly") from error
            except QueueFull as error:
                raise Overloaded(
                    f"the queue of this model is full ({error.scope})", retry_after_s=QUEUE_FULL_RETRY_AFTER_S
                ) from error
            except PayloadTooLarge as error:
                raise RequestTooLarge(str(error)) from error
            except JetStreamError as error:
                self._note(error)
                raise BrokerUnavailable(f"the broker cannot take the request: {error}") from error
            else:
                if self._standing is not None:
                    self._standing.stored()
                metrics.SUBMIT_S.observe(self._loop.time() - started)
                return

    def _note(self, error: JetStreamError) -> None:
        if self._standing is not None:
            self._standing.failed(error)

    # -- ends that start here --------------------------------------------------------------------------------

    def _cancel(self, request_id: str, cause: str) -> None:
        self._end(request_id, JobFault("cancelled", "the request was cancelled"), cause=cause)

    def _withdraw(self, name: str, tenant: str) -> int:
        open_now = [job for job in self._open.called(name, tenant) if self._judge.get(job.id) is not None]
        for job in open_now:
            log.info("job.withdrawn", request_id=job.id, name=name)
            self._end(job.id, JobFault("request_cancelled", "the request was cancelled by a call"), cause="call")
        return len(open_now)

    async def cancel(self, name: str, tenant: str, *, timeout_s: float) -> bool:
        """End a request by its id, or by what its client called it, at whichever ingress it is open.

        False when it is nowhere. Raises BrokerUnavailable when some ingress could not be asked and no other one had it.
        """
        if self._withdraw(name, tenant):
            return True
        others = [ingress for ingress in self._members.ingresses() if ingress != self.id]
        question = encode(CancelJob(name=name, tenant=tenant))
        answers = await asyncio.gather(*(self._ask_to_cancel(ingress, question, timeout_s) for ingress in others))
        if any(answers):
            return True
        if None in answers or not self._messaging.connected:
            raise BrokerUnavailable("not every frontend could be asked whether it has this request; try again shortly")
        return False

    async def _ask_to_cancel(self, ingress: str, question: bytes, timeout_s: float) -> bool | None:
        """None: it did not answer."""
        try:
            return decode(
                Done, await self._messaging.request(self._subjects.control(ingress), question, timeout_s=timeout_s)
            ).ok
        except NoResponder:
            return False  # its process is gone, and its requests with it
        except (JetStreamError, WireError):
            return None

    def _end(self, request_id: str, fault: JobFault, *, cause: str) -> None:
        record = self._judge.close(request_id, fault)
        if record is None:
            return
        metrics.CANCELLED.labels(cause).inc()
        if not self._cancels:
            asyncio.get_running_loop().call_soon(self._send_cancels)
        self._cancels.setdefault(record.pool, []).append(request_id)

    def _send_cancels(self) -> None:
        for pool, ids in self._cancels.items():
            self._messaging.send(self._subjects.cancel(pool), encode(Cancel(ids=ids)))
        self._cancels.clear()

    def _on_drained(self, request_id: str) -> None:
        self._judge.resume_reading(request_id)
        self._outbox.flush()

    def _on_poison(self, record: JobRecord, crashes: int) -> None:
        job = self._open.get(record.id)
        if job is None or self._tasks is None:
            return
        log.error(
            "job.poisoned", request_id=record.id, crashes=crashes, history=[[h.attempt, h.worker] for h in _sorted(record)]
        )
        letter = DeadLetter(
            envelope=job.envelope(),
            reason="poison",
            attempt=record.attempt,
            history=_sorted(record),
            at=self._wall(),
        )
        self._tasks.create_task(self._dead_letter(record.pool, record.id, encode(letter)))

    async def _dead_letter(self, pool: str, request_id: str, letter: bytes) -> None:
        while True:
            try:
                await self._messaging.publish(self._subjects.dlq(pool), letter, msg_id=f"{request_id}.dlq")
            except JetStreamError as error:
                log.warning("deadletter.retry", request_id=request_id, error=str(error))
                await asyncio.sleep(self._timing.retry_s)
            else:
                return

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
                    self._end(job.id, fault, cause="deadline")
                elif job.stream.paused_since_s is not None and now - job.stream.paused_since_s > self.settings.slow_client_s:
                    self._end(job.id, JobFault("slow_client", "the stream was not read in time"), cause="slow_client")
            self._ask_after(self._judge.silent(now, self._timing.silence_s), cause="silence")
            metrics.OPEN.set(len(self._judge))

    def _forget_ended(self) -> None:
        for job in self._open:
            if self._judge.get(job.id) is None:
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
                self._tasks.create_task(self._resubmit(job, attempt, _sorted(record)))

    async def _resubmit(self, job: OpenJob, attempt: int, history: list[HistoryEntry]) -> None:
        log.warning("job.resubmitted", request_id=job.id, attempt=attempt)
        metrics.RESUBMITTED.inc()
        nonce = f"{random.getrandbits(32):08x}"  # a nonce, not a secret
        while self._judge.get(job.id) is not None:
            try:
                await self._messaging.publish(
                    self._subjects.req(job.pool, "re", job.tenant),
                    job.body,
                    headers=job_headers(attempt, history),
                    msg_id=f"{job.id}.{attempt}@{nonce}",
                    ttl_s=message_ttl_s(job.deadline, self._wall(), self._timing.ttl_slack_s),
                    timeout_s=self._timing.publish_timeout_s,
                )
            except JetStreamError as error:
                log.warning("resubmit.retry", request_id=job.id, error=str(error))
                await asyncio.sleep(self._timing.retry_s)
            else:
                return


def _sorted(record: JobRecord) -> list[HistoryEntry]:
    return sorted(record.history, key=lambda entry: (entry.attempt, entry.worker))
