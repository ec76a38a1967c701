"""Defines what the audit stream keeps of requests (`hr.audit.<tenant>`, stream AUDIT)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.broker.messages.base import Count, Name, Record, Seconds, Token, Tokens, UnixTime

MOST_CONTENT = 16_384  # characters of a request's body, and of its answer


class AuditRecord(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A request to a generating route, from its arrival to its last byte, and what it cost.

    `code`: the error that ended it. `client_id`: the client's own name for it. `request` and `answer` are its content, where
    that is recorded, cut and redacted; `cut` says that a part of it is missing.
    """

    at: UnixTime
    id: Name
    frontend: Token
    route: Name
    tenant: Token
    key: Name = ""
    client_id: Name = ""
    model: Name = ""
    request_class: Name = ""
    status: Count = 0
    code: Name = ""
    took_s: Seconds = 0.0
    queue_s: Seconds | None = None
    ttft_s: Seconds | None = None
    prompt_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    workers: Annotated[list[Name], Meta(max_length=64)] = []
    attempts: Count = 0
    finish_reason: Name = ""
    request: Annotated[str, Meta(max_length=MOST_CONTENT)] = ""
    answer: Annotated[str, Meta(max_length=MOST_CONTENT)] = ""
    cut: bool = False
