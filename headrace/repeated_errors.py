"""Keeps errors that repeat from flooding the log: after some of a kind, the traceback is left out, then the line.

A bug that each message meets, or a sender of such messages, writes a traceback per message otherwise: gigabytes in an hour, on
the disk that the message store may need.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import structlog
from structlog.typing import EventDict, WrappedLogger

WINDOW_S = 10.0
TRACEBACKS = 5  # per window, of an event with one type of error
LINES = 100
MOST_KINDS = 1024


class RepeatedErrors:
    """A processor of structlog, placed before tracebacks are rendered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[tuple[str, str], int] = {}  # lines of this window
        self._left_out: dict[tuple[str, str], int] = {}  # of the windows before, not told yet
        self._until_s = 0.0

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        """Return the event, maybe without its traceback. Raises DropEvent for one too many."""
        kind = _kind(event)
        if kind is None:
            return event
        self._begin_window()
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count > LINES:
            raise structlog.DropEvent
        if count > TRACEBACKS:
            event.pop("exc_info", None)
            event.setdefault("error", kind[1])
        if left_out := self._left_out.pop(kind, 0):
            event["left_out"] = left_out
        return event

    def _begin_window(self) -> None:
        now_s = self._clock()
        if now_s < self._until_s and len(self._counts) < MOST_KINDS:
            return
        self._until_s = now_s + WINDOW_S
        for kind, count in self._counts.items():
            if count > LINES:
                self._left_out[kind] = self._left_out.get(kind, 0) + count - LINES
        while len(self._left_out) > MOST_KINDS:
            del self._left_out[next(iter(self._left_out))]
        self._counts.clear()


def _kind(event: EventDict) -> tuple[str, str] | None:
    """Return the event and the type of its error; None if it has no traceback."""
    given = event.get("exc_info")
    if not given:
        return None
    if isinstance(given, BaseException):
        error: type[BaseException] | None = type(given)
    elif isinstance(given, tuple):
        error = given[0]
    else:
        error = sys.exc_info()[0]
    return str(event.get("event", ""))[:100], error.__name__ if error is not None else ""
