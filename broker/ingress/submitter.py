"""Stores a request for the first time: durably and once, or with an error that says why it is not stored."""

from __future__ import annotations

import asyncio

from headrace.broker import metrics
from headrace.broker.codec import job_headers
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge
from headrace.broker.jobs import Job
from headrace.broker.message_paths import path_headers
from headrace.broker.protocol.resume import GENERATION, Resume
from headrace.broker.settings import IngressSettings
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import HealthPort, Messaging, PubAck
from headrace.jetstream.subjects import Subjects, moved_class

SUBMIT_TRIES = 3
QUEUE_FULL_RETRY_AFTER_S = 1.0


class Submitter:
    """Publishes the requests of one ingress."""

    def __init__(self, messaging: Messaging, subjects: Subjects, settings: IngressSettings, health: HealthPort | None) -> None:
        """`health` is told of each success, and of each failure of the broker."""
        self._messaging = messaging
        self._subjects = subjects
        self._settings = settings
        self._health = health
        self._loop = asyncio.get_running_loop()

    async def publish(self, job: Job, body: bytes, *, judge: str, resume: Resume | None = None) -> PubAck:
        """Store a request of the ingress `judge` in its pool's queue. Raises Overloaded, RequestTooLarge, BrokerUnavailable.

        One that resumes is stored as a moved one: its attempt is above 1, so that a worker claims it and learns where it is.
        """
        attempt = 1 if resume is None else resume.generation * GENERATION
        request_class = job.request_class if resume is None else moved_class(job.request_class)
        subject = self._subjects.req(job.card.pool, request_class, job.tenant)
        headers = job_headers(attempt, sorted(resume.history) if resume is not None else [])
        if job.trace:
            headers |= path_headers(self._subjects, job.trace, judge)
        timing = self._settings.timing
        started = self._loop.time()
        tries = 0
        while True:
            tries += 1
            try:
                stored = await self._messaging.publish(
                    subject,
                    body,
                    headers=headers,
                    msg_id=f"{job.id}.{attempt}",
                    ttl_s=job.deadline_s + timing.ttl_slack_s,
                    timeout_s=timing.publish_timeout_s,
                )
            except PublishUnknown as error:  # tried again under the same id: a duplicate does no harm, a loss does
                if tries == SUBMIT_TRIES:
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
                return stored

    def _report(self, error: JetStreamError) -> None:
        if self._health is not None:
            self._health.failed(error)
