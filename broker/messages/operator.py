"""Defines operators' commands to a worker on `hr.adm.worker.<pool>.<worker>`. Each is answered with Operated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.broker.messages.requests import Count, Name, Record, Seconds, Token, Tokens, UnixTime


class CheckHealth(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="health"):
    """A question whether the worker can serve. With `canary` its engine is asked for one token, too."""

    canary: bool = True
    timeout_s: float = 10.0  # for the engine's answer


class Sleep(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="sleep"):
    """A command to take nothing, finish or hand over the runs, and free the engine's memory. Answered when it sleeps."""

    level: int = 1
    grace_s: float | None = None  # after it the runs are handed over; None = that of the worker's drain


class Wake(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="wake"):
    """A command to end the sleep. Answered when the engine is warm and the worker takes requests again."""


class Pause(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="pause"):
    """A command to take nothing and to stop the engine's steps. Answered when it stands still.

    Without `grace_s` the runs stay in the engine and go on where they are at the end of the pause. With it they have so long to
    finish, and the rest is handed over.
    """

    grace_s: float | None = None


class Resume(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="resume"):
    """A command to end the pause."""


class ResetCache(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="reset_cache"):
    """A command to empty the engine's prefix cache."""


class Profile(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="profile"):
    """A command to start the engine's profiler, or to stop it and write down what it has seen."""

    action: Literal["start", "stop"]


class SetLogLevel(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="log_level"):
    """A command to log from this level on: debug, info, warning or error."""

    level: str


WorkerCommand = CheckHealth | Sleep | Wake | Pause | Resume | ResetCache | Profile | SetLogLevel


class Operated(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to an operator's command: `message` says what was done or why not, `report` what was found or measured."""

    ok: bool = True
    message: str = ""
    report: dict[str, Any] = {}


# Defines what is told about operators' commands (`hr.audit`), for the audit logs of frontends.


class OperatorAct(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A command of an operator that has changed something. `by` is the user's name as the command's machine says it."""

    command: Name
    by: Name = ""
    details: dict[Name, Name] = msgspec.field(default_factory=dict)


# Defines what the audit stream keeps of requests (`hr.audit.<tenant>`, stream AUDIT).

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
