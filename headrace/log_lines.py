"""Renders the lines of a JSON log. A line without a traceback, as nearly all are, is made in one step.

structlog calls each processor of its list for each line, which was half of what a line of the access log cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_LEVELS = {"warn": "warning", "exception": "error"}  # of the methods that are not named as their level
_WITH_TRACEBACK = ("exc_info", "stack_info")


class JsonLines:
    """A processor of structlog that makes the whole line."""

    def __init__(self, fields: Mapping[str, str], encode: Callable[[Any], bytes], rest: Sequence[Processor]) -> None:
        """`fields` are put on every line. `rest`: the processors that make a line with a traceback, one after the other."""
        self._fields = tuple(fields.items())
        self._encode = encode
        self._rest = tuple(rest)
        self._clock = Clock()

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> Any:
        """Return the line. Raises DropEvent for an error that is logged too often."""
        for name in _WITH_TRACEBACK:
            if name in event:
                return self._in_steps(logger, method, event)
        structlog.contextvars.merge_contextvars(logger, method, event)
        for name, value in self._fields:
            if name not in event:
                event[name] = value
        event["level"] = _LEVELS.get(method, method)
        event["timestamp"] = self._clock.now()
        return self._encode(event).decode()

    def _in_steps(self, logger: WrappedLogger, method: str, event: Any) -> Any:
        for processor in self._rest:
            event = processor(logger, method, event)
        return event


class Clock:
    """Tells the time in ISO 8601, UTC. The part down to the second is made once per second."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._wall_ns = wall_ns
        self._made: tuple[int, str] = (-1, "")

    def now(self) -> str:
        """Return the time with microseconds, as `2026-11-26T16:04:05.000123Z`."""
        second, rest_ns = divmod(self._wall_ns(), 1_000_000_000)
        made_for, text = self._made
        if made_for != second:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._made = second, text
        micros = rest_ns // 1000
        return f"{text}.{micros:06d}Z" if micros else f"{text}Z"  # as datetime writes it


class LineLogger:
    """Writes lines to a stream that takes whole texts from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._write = stream.write

    def msg(self, line: str) -> None:
        """Write a line."""
        self._write(line + "\n")

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg
