"""Publishes stored jobs: the broker's confirmation is the promise that the job will have one result."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.broker.durable.names import check_name
from headrace.broker.durable.stored_job import JobClass
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge
from headrace.broker.messages import HEADER_CLASS, HEADER_DEADLINE, HEADER_ENDPOINT, HEADER_JOB, HEADER_STREAM
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

PUBLISH_TRIES = 3
PUBLISH_TIMEOUT_S = 2.0
RETRY_AFTER_S = 1.0


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to store. `deadline` is Unix time; `durable`: its events are stored as they are made."""

    name: str
    tenant: str
    model_slug: str
    endpoint: str
    body: bytes
    deadline: float
    request_class: JobClass = "batch"
    durable: bool = False

    def headers(self) -> dict[str, str]:
        """Return the headers of the message."""
        headers = {
            HEADER_JOB: check_name(self.name),
            HEADER_ENDPOINT: self.endpoint,
            HEADER_CLASS: self.request_class,
            HEADER_DEADLINE: f"{self.deadline:.3f}",
        }
        return {**headers, HEADER_STREAM: "1"} if self.durable else headers


class JobPublisher:
    """Stores jobs of clients. The same name of a tenant twice is one job."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects

    async def publish(self, job: NewJob) -> None:
        """Store a job. Raises Overloaded, RequestTooLarge, BrokerUnavailable, after which it may be stored all the same."""
        subject = self._subjects.job(job.model_slug, job.tenant)
        for left in reversed(range(PUBLISH_TRIES)):
            try:
                await self._messaging.publish(
                    subject,
                    job.body,
                    headers=job.headers(),
                    msg_id=f"{job.tenant}.{job.name}",  # ids of messages count for all tenants
                    timeout_s=PUBLISH_TIMEOUT_S,
                )
            except PublishUnknown as error:  # a duplicate does no harm, a loss does
                if not left:
                    raise BrokerUnavailable("the broker does not confirm the job; repeat it under the same id") from error
                await asyncio.sleep(0)
            except QueueFull as error:
                raise Overloaded(f"the queue of jobs is full ({error.scope})", retry_after_s=RETRY_AFTER_S) from error
            except PayloadTooLarge as error:
                raise RequestTooLarge(str(error)) from error
            except JetStreamError as error:
                raise BrokerUnavailable(f"the broker cannot take the job: {error}") from error
            else:
                return
