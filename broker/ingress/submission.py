"""The submission of requests: stored once or refused with an error, and again when their judge may have looked dead."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import structlog

from headrace.broker import metrics
from headrace.broker.codec import job_headers, log_ids
from headrace.broker.dead_letters import until_done
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge
from headrace.broker.ingress.requests import OpenRequest, OpenRequests
from headrace.broker.ingress.waits import BrokerWait
from headrace.broker.jobs import Job
from headrace.broker.membership.mover import message_ttl_s
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.resume import GENERATION, Resume
from headrace.broker.settings import IngressSettings
from headrace.jetstream.errors import JetStreamError, NoLeader, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import HealthPort, Messaging, PubAck
from headrace.jetstream.subjects import Subjects, moved_class
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger()

SUBMIT_TRIES = 3  # without an ack, however short the wait for the broker may be
QUEUE_FULL_RETRY_AFTER_S = 1.0


class Submission:
    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        judge: Judge,
        requests: OpenRequests,
        wait: BrokerWait,
        health: HealthPort | None,
        tasks: TaskScope,
        *,
        settings: IngressSettings,
        wall: Callable[[], float],
    ) -> None:
        """`health` is notified of each success, and of each failure of the broker.

        `wait` holds requests that cannot be stored yet. New generations are published in `tasks`.
        """
        self._messaging = messaging
        self._subjects = subjects
        self._judge = judge
        self._requests = requests
        self._wait = wait
        self._health = health
        self._tasks = tasks
        self._settings = settings
        self._wall = wall
        self._lapsed = False
        self._loop = asyncio.get_running_loop()

    async def publish(self, job: Job, body: bytes, *, resume: Resume | None = None) -> PubAck:
        """Store a request in its pool's queue. Raises Overloaded, RequestTooLarge, BrokerUnavailable.

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

    def on_lease(self, held: bool) -> None:
        """Submit every open request again after a lapse: workers may have dropped them, as those of a dead judge.

        It must not be done before the lease is held again: a worker that reads a copy while there is no lease drops that, too.
        """
        if not held:
            metrics.LEASE_LAPSES.labels("ingress").inc()
            self._lapsed = True
        elif self._lapsed and self._tasks.is_open:
            self._lapsed = False
            self.resubmit()

    def resubmit(self) -> None:
        if not self._tasks.is_open:
            return
        for record, attempt in self._judge.on_lapse():
            job = self._requests.get(record.id)
            if job is not None:
                self._tasks.spawn(self._submit_again(job, attempt, sorted(record.history)))

    async def _submit_again(self, job: OpenRequest, attempt: int, history: list[HistoryEntry]) -> None:
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
                ttl_s=message_ttl_s(job.deadline, self._wall(), self._settings.timing.ttl_slack_s),
                timeout_s=self._settings.timing.publish_timeout_s,
            )

        def wanted() -> bool:
            return self._judge.get(job.id) is not None

        retry_s = self._settings.timing.retry_s
        await until_done(publish, event="resubmit.retry", retry_s=retry_s, wanted=wanted, request_id=job.id)


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
