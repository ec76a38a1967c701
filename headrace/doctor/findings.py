"""Defines the findings of `headrace doctor` and the exit code that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, EXIT_UNAVAILABLE

Level = Literal["ok", "unknown", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "warning", "error")

SERVER_UNREACHABLE = "server.reach"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `check` is a stable name for scripts; `remedy` says what to do, and is empty where all is well."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check, "ok", text)


def unknown(check: str, text: str, remedy: str = "") -> Finding:
    """Return a finding about what could not be seen; `remedy` says how it can be."""
    return Finding(check, "unknown", text, remedy)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that costs nothing yet."""
    return Finding(check, "warning", text, remedy)


def error(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps requests from being served, or risks what is stored."""
    return Finding(check, "error", text, remedy)


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return 69 when no server answers, 1 when there is an error (or, if `strict`, a warning), else 0."""
    found = list(findings)
    if any(f.check == SERVER_UNREACHABLE and f.level == "error" for f in found):
        return EXIT_UNAVAILABLE
    bad = ("error", "warning") if strict else ("error",)
    return EXIT_FAILURE if any(f.level in bad for f in found) else EXIT_OK
