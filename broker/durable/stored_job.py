"""Reads stored jobs: the message of a publisher in any of its forms, with defaults for what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, cast

import msgspec

from headrace.broker.codec import NOT_DECODED, decode
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.names import JobRef, check_name, job_id, job_token
from headrace.broker.errors import WireError
from headrace.broker.messages import (
    HEADER_BATCH,
    HEADER_CLASS,
    HEADER_CUSTOM_ID,
    HEADER_DEADLINE,
    HEADER_ENDPOINT,
    HEADER_JOB,
    HEADER_REPLY,
    HEADER_STREAM,
    Envelope,
)
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
        """The job by name."""
        return JobRef(tenant=self.tenant, name=self.name, durable=self.durable, batch=self.batch, custom_id=self.custom_id)

    @property
    def id(self) -> str:
        """The id inside Headrace, before the mark of a run."""
        return job_id(self.tenant, self.name)

    @property
    def token(self) -> str:
        """The token in the subjects of its result and entries."""
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
