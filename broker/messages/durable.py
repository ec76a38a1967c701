"""Defines the messages of durable work: entries of a job's stream, results, progress, and questions between carriers."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.broker.messages.control import History, HistoryEntry
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.messages.requests import WIRE_VERSION, Count, Envelope, OptionalToken, Record

# Headers of a message on hr.job.<model slug>.<tenant>; all are optional.
HEADER_JOB = "Hr-Job"  # the publisher's id of the job; absent = Nats-Msg-Id, `custom_id` or `seq-<sequence>`
HEADER_ENDPOINT = "Hr-Endpoint"  # absent = /v1/chat/completions
HEADER_CLASS = "Hr-Class"  # batch, std or hi; absent = batch
HEADER_DEADLINE = "Hr-Deadline"  # Unix seconds; absent = a day after it was stored
HEADER_REPLY = "Hr-Reply"  # a core subject that gets a copy of the result
HEADER_STREAM = "Hr-Stream"  # "1": its events are stored as they are made
HEADER_BATCH = "Hr-Batch"  # the id of the batch that it is a line of
HEADER_CUSTOM_ID = "Hr-Custom-Id"  # the client's id of the line, repeated in the result

JobStatus = Literal["done", "failed", "cancelled", "expired", "poison", "malformed"]
EntryKind = Literal["take", "rows", "end", "ok", "crash"]


class StreamEntry(Record, frozen=True, omit_defaults=True, kw_only=True):
    """An entry of a job on hr.rsp.<tenant>.<job>. `nonce` and `n` name the writer's delivery and count its entries from 1."""

    nonce: str
    n: Count
    kind: EntryKind
    carrier: OptionalToken = ""  # of `take`: the ingress that carries the job from here on
    rows: list[Row] = []  # of `rows` and `end`; their ids of requests are empty
    first_event: Count = 0  # the number of the first of `events` inside the job
    events: list[bytes] = []  # what clients get, as JSON
    status: JobStatus | None = None  # of `end`
    fault: JobFault | None = None  # of `end`
    history: History = []  # of `crash`


class ResultResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that an HTTP client would have got."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class ResultError(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a job has no answer."""

    code: str
    message: str


class ResultObject(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a response that is too large for a message, in the object store `<prefix>_results`."""

    name: str
    size: int
    digest: str  # SHA-256, hex


class ResultTokens(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Tokens of a job."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


class JobResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The one result of a job, as JSON on hr.result.<tenant>.<job>. Without an answer, or with an `object`, no `response`."""

    id: str  # the publisher's id
    status: JobStatus
    v: int = msgspec.field(default_factory=lambda: WIRE_VERSION)
    custom_id: str = ""
    response: ResultResponse | None = None
    object: ResultObject | None = None  # a JSON `ResultResponse`
    error: ResultError | None = None
    tokens: ResultTokens = ResultTokens()
    finished: float = 0.0


class JobProgress(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A step of a job, as JSON on hr.jobev.<tenant>.<job>. It may be lost: the result is what counts."""

    id: str
    event: Literal["taken", "started", "progress", "finished"]
    v: int = msgspec.field(default_factory=lambda: WIRE_VERSION)
    status: JobStatus | None = None  # of `finished`
    tokens: int = 0  # made so far
    carrier: str = ""


# Defines dead letters, which are stored on hr.dlq.<pool>.


class DeadLetter(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A job taken out of service, with everything that is needed to inspect or retry it."""

    envelope: Envelope
    reason: str
    attempt: int
    history: list[HistoryEntry]
    at: float


class Unreadable(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A queued message that could not be decoded. `data` is its beginning."""

    subject: str
    why: str
    data: bytes
    at: float
