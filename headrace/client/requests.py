"""Builds the message of a job from what a program has: a request body, a line of a batch file, or a `Request`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.names import check_name
from headrace.broker.durable.stored_job import DEFAULT_ENDPOINT, JOB_CLASSES
from headrace.broker.jobs import new_id
from headrace.broker.messages import (
    HEADER_CLASS,
    HEADER_CUSTOM_ID,
    HEADER_DEADLINE,
    HEADER_ENDPOINT,
    HEADER_JOB,
    HEADER_REPLY,
    HEADER_STREAM,
)
from headrace.client.errors import NotSubmitted
from headrace.jetstream.subjects import slug
from headrace.jetstream.topology import LONGEST_DEADLINE_S

Priority = Literal["batch", "std", "hi"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A job to submit. `body` is the JSON of an HTTP request; `id` names the job for good: the same id twice is one job.

    `deadline_s`: seconds from now after which the job ends as `expired`, a day by default and seven at most.
    """

    body: Mapping[str, Any]
    id: str = msgspec.field(default_factory=new_id)
    endpoint: str = DEFAULT_ENDPOINT
    priority: Priority = "batch"
    deadline_s: float | None = None
    custom_id: str = ""
    reply: str = ""  # a subject that gets a copy of the result
    durable: bool = False  # the answer's events are stored as they are made


class JobMessage(msgspec.Struct, frozen=True):
    """A job as it is published."""

    id: str
    model_slug: str
    data: bytes
    headers: dict[str, str]


def as_request(given: Request | Mapping[str, Any], **options: Any) -> Request:
    """Return a request from any form: itself, a line of a batch file, or a body with `options`. Raises NotSubmitted."""
    if isinstance(given, Request):
        return msgspec.structs.replace(given, **options) if options else given
    if isinstance(given.get("body"), Mapping) and "custom_id" in given and "url" in given:
        method, custom_id = given.get("method", "POST"), str(given["custom_id"])
        if method != "POST":
            raise NotSubmitted(f"line {custom_id!r} has the method {method!r}; it must be POST")
        line = {"body": given["body"], "endpoint": str(given["url"]), "custom_id": custom_id, "id": custom_id}
        return Request(**(line | options))
    return Request(body=given, **options)


def message_of(request: Request, *, default_model: str | None = None, now: float | None = None) -> JobMessage:
    """Return the message of a request. `default_model` is for bodies that name none. Raises NotSubmitted."""
    model = request.body.get("model") or default_model
    if not isinstance(model, str):
        raise NotSubmitted(f"job {request.id!r} names no model: its body has {request.body.get('model')!r}")
    if request.priority not in JOB_CLASSES:
        raise NotSubmitted(f"the priority {request.priority!r} is not one of {', '.join(JOB_CLASSES)}")
    deadline_s = request.deadline_s
    if deadline_s is not None and not 0 < deadline_s <= LONGEST_DEADLINE_S:
        raise NotSubmitted(f"a deadline must be above 0 and at most {LONGEST_DEADLINE_S:.0f} s, got {deadline_s!r}")
    try:
        headers = {HEADER_JOB: check_name(request.id), HEADER_ENDPOINT: request.endpoint, HEADER_CLASS: request.priority}
        data = msgspec.json.encode(request.body if request.body.get("model") else {**request.body, "model": model})
    except (JobMalformed, TypeError, ValueError, OverflowError) as error:
        raise NotSubmitted(f"job {request.id[:80]!r} cannot be submitted: {error}") from None
    if deadline_s is not None:
        headers[HEADER_DEADLINE] = f"{(time.time() if now is None else now) + deadline_s:.3f}"
    optional = {HEADER_CUSTOM_ID: request.custom_id, HEADER_REPLY: request.reply, HEADER_STREAM: "1" if request.durable else ""}
    headers |= {name: value for name, value in optional.items() if value}
    if bad := next((value for value in headers.values() if not value.isprintable()), None):
        raise NotSubmitted(f"a header of job {request.id!r} has a character that cannot be sent: {bad[:80]!r}")
    return JobMessage(request.id, slug(model), data, headers)
