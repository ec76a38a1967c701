"""Stored jobs: read from the message of a publisher in any of its forms, published, and rendered through ports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal, Protocol, cast

import msgspec

from headrace.broker.codec import NOT_DECODED, decode
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.names import JobRef, check_name, job_id, job_token
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge, WireError
from headrace.broker.jobs import Job
from headrace.broker.messages.durable import (
    HEADER_BATCH,
    HEADER_CLASS,
    HEADER_CUSTOM_ID,
    HEADER_DEADLINE,
    HEADER_ENDPOINT,
    HEADER_JOB,
    HEADER_REPLY,
    HEADER_STREAM,
    JobResult,
    ResultResponse,
    ResultTokens,
)
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.messages.requests import Envelope
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import DAY_S, LONGEST_DEADLINE_S

JobClass = Literal["hi", "std", "batch"]
JOB_CLASSES = ("hi", "std", "batch")
DEFAULT_ENDPOINT = "/v1/chat/completions"
DEFAULT_DEADLINE_S = DAY_S

_MSG_ID = "Nats-Msg-Id"


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is stored. `body` is the request of an HTTP client, as JSON; `created` is when it was stored, Unix time.

    A job that is tokenised already has an `envelope` in place of a body; its id, judge and deadline mean nothing.
    """

    name: str
    tenant: str
    endpoint: str
    body: bytes
    deadline: float
    created: float
    request_class: JobClass = "batch"
    durable: bool = False  # its events are stored as they are made
    reply: str = ""
    batch: str = ""
    custom_id: str = ""
    envelope: Envelope | None = None

    @property
    def ref(self) -> JobRef:
        return JobRef(tenant=self.tenant, name=self.name, durable=self.durable, batch=self.batch, custom_id=self.custom_id)

    @property
    def id(self) -> str:
        return job_id(self.tenant, self.name)

    @property
    def token(self) -> str:
        return job_token(self.name)


class _Line(msgspec.Struct):
    """A line of an OpenAI batch file, which may be published as it is."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


def parse_job(data: bytes, headers: Mapping[str, str], *, tenant: str, seq: int, stored: float) -> StoredJob:
    """Read a job from its message, of stream sequence `seq`, stored at the Unix time `stored`. Raises JobMalformed."""
    body, envelope = _body_of(data)
    line = _line_of(body)
    custom_id = headers.get(HEADER_CUSTOM_ID) or (line.custom_id if line is not None else "")
    endpoint = headers.get(HEADER_ENDPOINT) or (line.url if line is not None else DEFAULT_ENDPOINT)
    request_class = headers.get(HEADER_CLASS, "batch")
    if request_class not in JOB_CLASSES:
        raise JobMalformed(f"{HEADER_CLASS} is {request_class[:80]!r}; it can be {', '.join(JOB_CLASSES)}")
    return StoredJob(
        name=check_name(name_of(headers, seq, custom_id)),
        tenant=tenant,
        endpoint=endpoint,
        body=bytes(line.body) if line is not None else body,
        deadline=_deadline(headers.get(HEADER_DEADLINE), stored),
        created=stored,
        request_class=cast("JobClass", request_class),
        durable=headers.get(HEADER_STREAM) == "1",
        reply=headers.get(HEADER_REPLY, ""),
        batch=headers.get(HEADER_BATCH, ""),
        custom_id=custom_id,
        envelope=envelope,
    )


def name_of(headers: Mapping[str, str], seq: int, custom_id: str = "") -> str:
    """Return the id of a job: its publisher's or, where there is none, one by its place in the stream."""
    return headers.get(HEADER_JOB) or headers.get(_MSG_ID) or custom_id or f"seq-{seq}"


def _body_of(data: bytes) -> tuple[bytes, Envelope | None]:
    """Return a body as JSON, or as an envelope. Raises JobMalformed."""
    if data.lstrip()[:1] == b"{":
        return data, None
    try:
        value: Any = msgspec.msgpack.decode(data)
    except NOT_DECODED as error:
        raise JobMalformed(f"the body is neither a JSON object nor msgpack: {error}") from None
    if not isinstance(value, dict):
        raise JobMalformed(f"the body is a msgpack {type(value).__name__}; it must be a map")
    try:
        if "payload" in value or "spill" in value:
            return b"", decode(Envelope, data)
        return msgspec.json.encode(value), None
    except (WireError, TypeError, UnicodeError, RecursionError) as error:
        raise JobMalformed(f"the msgpack body is neither a request nor an Envelope: {error}") from None


def _line_of(body: bytes) -> _Line | None:
    """Return a body as a line of a batch file; None if it is a plain request. Broken JSON is left to the API's own error."""
    try:
        return msgspec.json.decode(body, type=_Line)
    except NOT_DECODED:
        return None


def _deadline(value: str | None, stored: float) -> float:
    if value is None:
        return stored + DEFAULT_DEADLINE_S
    try:
        deadline = float(value)
    except ValueError:
        deadline = float("nan")
    if not isfinite(deadline):
        raise JobMalformed(f"{HEADER_DEADLINE} is {value[:80]!r}; it must be a Unix time in seconds")
    return min(deadline, stored + LONGEST_DEADLINE_S)


PUBLISH_TRIES = 3
PUBLISH_TIMEOUT_S = 2.0
RETRY_AFTER_S = 1.0


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to store. `deadline` is Unix time; `durable`: its events are stored as they are made.

    `digest`: of its request, if a client chose the name; empty for a name that no other job can have.
    """

    name: str
    tenant: str
    model_slug: str
    endpoint: str
    body: bytes
    deadline: float
    request_class: JobClass = "batch"
    durable: bool = False
    digest: str = ""

    def headers(self) -> dict[str, str]:
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


class RenderedJob(Protocol):
    """A stored job, ready for submission: the requests that it becomes, and the writer of its answer.

    Rows go in by `take`, in order and once each, also those of earlier carriers: the same rows make the same events and the
    same answer on every frontend. Choices count over all `requests`.
    """

    @property
    def requests(self) -> Sequence[Job]:
        """The requests to submit; a durable stream has one."""

    @property
    def open(self) -> bool:
        """True while more rows are needed."""

    def take(self, rows: list[Row]) -> list[bytes]:
        """Take rows. Returns the events that they make for the clients of a durable stream; a plain job makes none."""

    async def finish(self) -> list[bytes]:
        """Do what is left after the last row (store a response, say) and return the last events. Raises as its writer does."""

    def fail(self, fault: JobFault) -> list[bytes]:
        """End the answer with a fault. Returns the last events."""

    def response(self) -> ResultResponse:
        """Return the whole answer; after `fail` the error in the form of its API."""

    @property
    def tokens(self) -> ResultTokens:
        """The tokens counted so far."""

    def settled(self) -> None:
        """Count the tokens of a job whose result was seen. Called at most once."""


class CarriedBatches(Protocol):
    def closing(self, batch_id: str) -> Literal["cancelled", "expired"] | None:
        """Return how the lines of a batch end that have no result yet; None while it goes on, as far as is known."""

    def see(self, job: JobRef, result: JobResult) -> None:
        """Note the result of a line that was seen at the broker: the first one of the job, which never changes."""


class JobRenderer(Protocol):
    """Renders stored jobs: checks the body, applies the template, makes token ids."""

    def serves(self, model_slug: str) -> bool:
        """Return whether a model of this slug has a card here."""

    async def render(self, job: StoredJob, run: str) -> RenderedJob:
        """Render a job for the run of this id. Its answer's own id and time come from the job, so they are the same each time.

        Raises JobRejected for a job that can never run as it is (bad body, unknown model), AdmissionError for one that cannot
        run now.
        """
