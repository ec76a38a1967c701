"""Submission of requests: stored durably once or refused with an error, held while something is away, and submitted again."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, job_headers, log_ids
from headrace.broker.dead_letters import until_done
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge, WireError
from headrace.broker.ingress.requests import OpenRequest, OpenRequests, RequestOwner
from headrace.broker.jobs import Job
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.resume import GENERATION, Resume
from headrace.broker.settings import IngressSettings, Timing
from headrace.jetstream.errors import JetStreamError, NoLeader, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import HealthPort, Messaging, PubAck
from headrace.jetstream.subjects import Subjects, moved_class
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

MOST = 1000  # requests that are held at once; more are refused, as all were without this


class BrokerWait:
    def __init__(self, away: Callable[[], bool], *, longest_s: float) -> None:
        """`away` returns whether the broker is away and may be back soon. `longest_s`: 0 holds no request."""
        self.longest_s = longest_s
        self._away = away
        self._changed = asyncio.Event()
        self._held = 0

    def back(self) -> None:
        """Look again whether the broker can be used. To be called after a reconnection, and when the lease is held again."""
        self._changed.set()

    def enter(self, why: str) -> bool:
        """Begin to hold a request, which must `leave` later. Returns False if too many are held: it is then refused."""
        if self._held >= MOST:
            metrics.BROKER_AWAITED.labels("too_many").inc()
            return False
        if not self._held:
            log.info("broker.awaited", longest_s=self.longest_s, why=why)
        self._held += 1
        metrics.AWAITING_BROKER.set(self._held)
        return True

    def leave(self, outcome: str) -> None:
        self._held -= 1
        metrics.AWAITING_BROKER.set(self._held)
        metrics.BROKER_AWAITED.labels(outcome).inc()

    async def hold(self, longest_s: float) -> None:
        longest_s = min(longest_s, self.longest_s)
        if longest_s <= 0 or not self._away():
            return
        if not self.enter("not connected, or the lease is not held"):
            return
        outcome = "away"
        try:
            async with asyncio.timeout(longest_s):
                while self._away():
                    self._changed.clear()
                    await self._changed.wait()
            outcome = "back"
        except TimeoutError:
            pass
        finally:
            self.leave(outcome)


# Holds requests that came while no worker could take them, until one can or their patience is over.
#
# Such a request is stored in its queue like any other, so routers have it in their windows and place it as soon as a worker
# is there. The ingress alone decides how long it may wait for that, because it is the judge and knows the setting. A request
# that is let go was never started here; its copy is removed from the queue, where it would count against the cap until its
# TTL.

CHECK_S = 0.25
LEAST_NAP_S = 0.001
RETRY_AFTER_S = 1.0

Outcome = Literal["worker", "no_worker", "ended"]


class _Held(NamedTuple):
    id: str
    stored: PubAck
    since_s: float
    until_s: float


class _Wanted(NamedTuple):
    """The worker that held requests wait for: one of the pool, with the adapter unless that is empty."""

    pool: str
    model: str
    adapter: str


class WorkerWait:
    def __init__(self, messaging: Messaging, members: Members, judge: Judge, owner: RequestOwner, *, longest_s: float) -> None:
        """`longest_s`: how long a request may be held; it is never held beyond its deadline. 0: none may be."""
        self.longest_s = longest_s
        self._messaging = messaging
        self._members = members
        self._judge = judge
        self._owner = owner
        self._held: dict[_Wanted, dict[str, _Held]] = {}
        self._leftovers: deque[_Held] = deque()  # bounded by the open requests of the ingress
        self._some = asyncio.Event()
        self._left_over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        members.on_change(self._on_members)

    def __len__(self) -> int:
        return sum(len(group) for group in self._held.values())

    def served(self, job: Job) -> bool:
        return bool(self._members.having(job.card.pool, job.adapter))

    def answerable(self, job: Job) -> bool:
        return self._members.answerable(job.card.pool, job.adapter)

    def hold(self, job: Job, stored: PubAck, since_s: float) -> None:
        """Begin to hold a request that was submitted at `since_s`, unless a worker has come meanwhile.

        Where none may be held, a request is only stored while a worker is there.  One whose worker left before the ack is then
        like one whose worker left after it: it has the time until its deadline.
        """
        if not self.longest_s or self.served(job) or self._judge.get(job.id) is None:
            return
        wanted = _Wanted(job.card.pool, job.card.model, job.adapter)
        group = self._held.setdefault(wanted, {})
        if not group:
            log.warning("requests.held", **wanted._asdict(), longest_s=self.longest_s)
        group[job.id] = _Held(job.id, stored, since_s, since_s + min(self.longest_s, job.deadline_s))
        metrics.HELD.set(len(self))
        self._some.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._remove_leftovers())

    def _on_members(self) -> None:
        for wanted in list(self._held):
            if self._members.having(wanted.pool, wanted.adapter):
                group = self._held.pop(wanted)
                for held in group.values():
                    self._note(held, "worker")
                log.info("requests.released", **wanted._asdict(), requests=len(group))
                metrics.HELD.set(len(self))

    async def _watch(self) -> None:
        while True:
            await self._some.wait()
            next_s = self._check(self._loop.time())
            if next_s is None:
                self._some.clear()
            else:
                await asyncio.sleep(min(CHECK_S, max(LEAST_NAP_S, next_s - self._loop.time())))

    def _check(self, now_s: float) -> float | None:
        """Let go whose time is up, and forget those that ended or began by themselves. Return when the next time is up."""
        for wanted, group in list(self._held.items()):
            refused = 0
            for held in list(group.values()):
                record = self._judge.get(held.id)
                if record is not None and record.run is None and (now_s < held.until_s or self._comes(wanted)):
                    continue
                del group[held.id]
                if record is None:
                    self._leave(held, "ended")
                elif record.run is not None:  # a worker whose lease is not known here yet
                    self._note(held, "worker")
                else:
                    self._refuse(wanted, held, now_s)
                    refused += 1
            if refused:
                log.warning("requests.not_served", **wanted._asdict(), requests=refused)
            if not group:
                del self._held[wanted]
        metrics.HELD.set(len(self))
        return min((held.until_s for group in self._held.values() for held in group.values()), default=None)

    def _comes(self, wanted: _Wanted) -> bool:
        return self._members.waking(wanted.pool, wanted.adapter)

    def _refuse(self, wanted: _Wanted, held: _Held, now_s: float) -> None:
        name = wanted.adapter or wanted.model
        message = f"model {name!r} has no ready worker, and none came in {now_s - held.since_s:.1f} s"
        fault = JobFault("no_worker", message, retriable=True, retry_after_s=RETRY_AFTER_S)
        self._owner.end(held.id, fault, cause="no_worker")
        self._leave(held, "no_worker")

    def _leave(self, held: _Held, outcome: Outcome) -> None:
        self._note(held, outcome)
        self._leftovers.append(held)
        self._left_over.set()

    def _note(self, held: _Held, outcome: Outcome) -> None:
        metrics.HELD_ENDED.labels(outcome).inc()
        metrics.HELD_S.observe(self._loop.time() - held.since_s)

    async def _remove_leftovers(self) -> None:
        while True:
            await self._left_over.wait()
            while self._leftovers:
                held = self._leftovers.popleft()
                try:
                    await self._remove(held)
                except JetStreamError as error:  # its TTL, or the worker that asks this judge about it, removes it later
                    log.debug("request.left_in_queue", request_id=held.id, error=str(error))
            self._left_over.clear()

    async def _remove(self, held: _Held) -> None:
        """Delete the stored copy if it is still there. The message is read first: its stream may have been made again."""
        stored = await self._messaging.get_message(held.stored.stream, held.stored.seq)
        try:
            if stored is not None and decode(Envelope, stored.data).id == held.id:
                await self._messaging.delete_message(held.stored.stream, held.stored.seq)
        except WireError as error:
            log.debug("request.left_in_queue", request_id=held.id, error=str(error))


SUBMIT_TRIES = 3  # without an ack, however short the wait for the broker may be
QUEUE_FULL_RETRY_AFTER_S = 1.0


class Submitter:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        settings: IngressSettings,
        health: HealthPort | None,
        *,
        wait: BrokerWait,
    ) -> None:
        """`health` is notified of each success, and of each failure of the broker.

        `wait` holds requests that cannot be stored yet.
        """
        self._messaging = messaging
        self._subjects = subjects
        self._settings = settings
        self._health = health
        self._wait = wait
        self._loop = asyncio.get_running_loop()

    async def publish(self, job: Job, body: bytes, *, judge: str, resume: Resume | None = None) -> PubAck:
        """Store a request of the ingress `judge` in its pool's queue. Raises Overloaded, RequestTooLarge, BrokerUnavailable.

        While its stream has no leader, or no ack comes, it is held and sent again, at most for the time of `wait`.
        One that resumes is stored as a moved one: its attempt is above 1, so that a worker claims it and learns where it is.
        """
        attempt = 1 if resume is None else resume.generation * GENERATION
        request_class = job.request_class if resume is None else moved_class(job.request_class)
        subject = self._subjects.req(job.card.pool, request_class, job.tenant)
        headers = job_headers(attempt, sorted(resume.history) if resume is not None else [])
        timing = self._settings.timing
        started = self._loop.time()
        patience: _Patience | None = None
        try:
            while True:
                try:
                    stored = await self._messaging.publish(
                        subject,
                        body,
                        headers=headers,
                        msg_id=f"{job.id}.{attempt}",
                        ttl_s=job.deadline_s + timing.ttl_slack_s,
                        timeout_s=timing.publish_timeout_s,
                    )
                except (NoLeader, PublishUnknown) as error:
                    if patience is None:
                        patience = _Patience(self._wait, until=started + min(job.deadline_s, self._wait.longest_s))
                    if not patience.lasts(error, self._loop.time()):
                        self._report(error)
                        raise BrokerUnavailable("the broker does not confirm the request; try again shortly") from error
                except QueueFull as error:
                    raise Overloaded(
                        f"the queue of this model is full ({error.scope})", retry_after_s=QUEUE_FULL_RETRY_AFTER_S
                    ) from error
                except PayloadTooLarge as error:
                    raise RequestTooLarge(str(error)) from error
                except JetStreamError as error:
                    self._report(error)
                    raise BrokerUnavailable(f"the broker cannot take the request: {error}") from error
                else:
                    if self._health is not None:
                        self._health.stored()
                    metrics.SUBMIT_S.observe(self._loop.time() - started)
                    if patience is not None:
                        patience.outcome = "back"
                    return stored
        finally:
            if patience is not None:
                patience.end()

    def _report(self, error: JetStreamError) -> None:
        if self._health is not None:
            self._health.failed(error)


class _Patience:
    """Decides how long one request is sent again under the same id: a duplicate does no harm, a loss does."""

    def __init__(self, wait: BrokerWait, *, until: float) -> None:
        self.outcome = "away"
        self._wait = wait
        self._until = until
        self._tries = 0
        self._held = False

    def lasts(self, error: JetStreamError, now: float) -> bool:
        self._tries += 1
        # A server that is busy may confirm late, without a fault.
        if now >= self._until and not (isinstance(error, PublishUnknown) and self._tries < SUBMIT_TRIES):
            return False
        self._held = self._held or self._wait.enter(str(error))
        return self._held

    def end(self) -> None:
        if self._held:
            self._wait.leave(self.outcome)


class Resubmitter:
    """Publishes new generations of open requests: after a lapse of the ingress's lease, or on request."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        requests: OpenRequests,
        tasks: TaskScope,
        *,
        timing: Timing,
        wall: Callable[[], float],
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._judge = judge
        self._requests = requests
        self._tasks = tasks
        self._timing = timing
        self._wall = wall
        self._lapsed = False

    def on_lease(self, held: bool) -> None:
        if held:
            self.on_gained()
        else:
            self.on_lapse()

    def on_lapse(self) -> None:
        metrics.LEASE_LAPSES.labels("ingress").inc()
        self._lapsed = True

    def on_gained(self) -> None:
        """Submit every open request again if the lease had lapsed: workers may have dropped them, as those of a dead judge.

        It must not be done before the lease is held again: a worker that reads a copy while there is no lease drops that, too.
        """
        if self._lapsed and self._tasks.is_open:
            self._lapsed = False
            self.resubmit()

    def resubmit(self) -> None:
        if not self._tasks.is_open:
            return
        for record, attempt in self._judge.on_lapse():
            job = self._requests.get(record.id)
            if job is not None:
                self._tasks.spawn(self._submit(job, attempt, sorted(record.history)))

    async def _submit(self, job: OpenRequest, attempt: int, history: list[HistoryEntry]) -> None:
        log.warning("job.resubmitted", **log_ids(job), attempt=attempt)
        metrics.RESUBMITTED.inc()
        envelope = job.envelope()
        subject = self._subjects.req(job.pool, moved_class(envelope.request_class), job.tenant)
        headers = job_headers(attempt, history)
        nonce = f"{random.getrandbits(32):08x}"  # a nonce, not a secret

        async def publish() -> None:
            await self._messaging.publish(
                subject,
                job.body,
                headers=headers,
                msg_id=f"{job.id}.{attempt}@{nonce}",
                ttl_s=message_ttl_s(job.deadline, self._wall(), self._timing.ttl_slack_s),
                timeout_s=self._timing.publish_timeout_s,
            )

        wanted = partial(self._is_open, job.id)
        await until_done(publish, event="resubmit.retry", retry_s=self._timing.retry_s, wanted=wanted, request_id=job.id)

    def _is_open(self, request_id: str) -> bool:
        return self._judge.get(request_id) is not None
