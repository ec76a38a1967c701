"""Defines operators' commands to a worker on `hr.adm.worker.<pool>.<worker>`. Each is answered with Operated."""

from __future__ import annotations

from typing import Any, Literal

from headrace.broker.messages.base import Record


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
