"""Configures the logging of a Headrace process: structlog, and the libraries' stdlib logging through it.

`configure` is called once per process, by the command line only.  Lines go to stderr: coloured text on a terminal, one JSON
object per line otherwise.  Every line carries the component and, where bound, worker and request (structlog contextvars).
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

# Renders the lines of a JSON log. A line without a traceback, as nearly all are, is made in one step.
#
# structlog calls each processor of its list for each line, which was half of what a line of the access log cost.

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
    def __init__(self, stream: TextIO) -> None:
        self._write = stream.write

    def msg(self, line: str) -> None:
        self._write(line + "\n")

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


# Writes the log of a process in a thread of its own: who logs never waits for what reads the log, and lines leave in batches.
#
# A log goes into a pipe, a terminal or a file. Each of them can stand still: a pipe whose reader is frozen is full after 64
# KiB, and one more write would then stop the event loop, and with it every request.

MOST_CHARS = 1 << 20  # that wait to be written; what comes on top of that is dropped
GATHER_S = 0.02  # lines that come within it are one write, and wake their reader once
END_S = 2.0  # for what waits at the end of the process


class LogThread(io.TextIOBase):
    """Text stream that takes everything at once. What it has no room for is dropped and counted, and told when it goes on.

    `stream` is written to by the thread alone, and must not raise. Without `start`, in a process that was forked and after
    `close` writes go to it directly.
    """

    def __init__(self, stream: TextIO, *, most_chars: int = MOST_CHARS, gather_s: float = GATHER_S) -> None:
        super().__init__()
        self._stream = stream
        self._most_chars = most_chars
        self._gather_s = gather_s
        self._lock = threading.RLock()  # a finaliser may log where a line is being added
        self._waiting: list[str] = []
        self._chars = 0
        self._lost = 0  # since it was told
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False = the end
        self._thread: threading.Thread | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Is called for each write that is dropped."""

    def start(self) -> None:
        """Begin to write in a thread, until `close` or the end of the process."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if self._thread is None:
            return self._stream.write(text)
        with self._lock:
            first = not self._waiting
            if self._chars + len(text) > self._most_chars:
                self._lost += 1
                self.on_lost()
                return len(text)
            self._waiting.append(text)
            self._chars += len(text)
        if first:
            self._wake.put(True)
        return len(text)

    def flush(self) -> None:
        """Do nothing: what was written leaves soon."""

    def close(self) -> None:
        """Write the queued lines, within `END_S`, and later ones directly."""
        thread = self._thread
        if thread is None:
            return
        self._wake.put(False)
        thread.join(END_S)
        if not thread.is_alive():  # else it stands still, as a direct write would
            self._thread = None
            self._write_waiting()

    def _run(self) -> None:
        while self._wake.get():
            time.sleep(self._gather_s)
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        with self._lock:
            texts, self._waiting, self._chars = self._waiting, [], 0
            lost, self._lost = self._lost, 0
        if texts:
            self._stream.write("".join(texts))
        if lost:
            self._stream.write(json.dumps({"event": "log.lost", "level": "warning", "writes": lost}) + "\n")

    def _forked(self) -> None:
        """Leave what waits to the process that has the thread."""
        self._lock = threading.RLock()
        self._thread, self._waiting, self._chars, self._lost = None, [], 0, 0


# Keeps errors that repeat from flooding the log: after some of a kind, the traceback is left out, then the line.
#
# A bug that each message meets, or a sender of such messages, writes a traceback per message otherwise: gigabytes in an hour,
# on the disk that the message store may need.

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


Format = Literal["auto", "console", "json"]

_VLLM_CONFIG = Path(__file__).parents[1] / "assets" / "vllm_logging.json"

# Libraries that say more than an operator wants; their warnings stay.
_QUIET = ("uvicorn", "asyncio", "nats")


class LogStream(io.TextIOBase):
    """Text stream that never fails: what cannot be written is dropped and counted, and the next line begins with the count.

    A log on a full disk, or on a terminal that was closed, must not end the process that logs.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self.lost = 0

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        try:
            if self.lost:
                # What was lost may have begun: the line that it left is ended first.
                self._stream.write("\n" + json.dumps({"event": "log.lost", "level": "warning", "writes": self.lost}) + "\n")
                self._stream.flush()
                self.lost = 0
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self.lost += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is flushed."""


def in_thread() -> LogThread:
    """Return a stream to stderr for a process that serves: nothing in it waits for what reads its log."""
    try:
        descriptor = sys.stderr.fileno()
    except OSError:  # a stream in memory, which never stands still, needs no thread
        return LogThread(cast("TextIO", LogStream(sys.stderr)))
    # A text layer of its own over the same descriptor: one that stands still must not hold the lock of `sys.stderr`.
    stream = open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    log = LogThread(cast("TextIO", LogStream(stream)))
    log.start()
    return log


def configure(
    *,
    log_format: Format = "auto",
    level: str = "info",
    fields: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
) -> Literal["console", "json"]:
    """Route all logging of this process. `fields` are put on every line. Returns the format that `auto` stood for."""
    stream = stream or cast("TextIO", LogStream(sys.stderr))
    chosen = choose_format(log_format, stream)
    number = logging.getLevelNamesMapping()[level.upper()]
    shared = _shared_processors(fields or {}, chosen)
    _filter(number)
    processors: list[Processor] = [*shared, *_renderers(chosen, stream)]
    if chosen == "json":
        processors = [JsonLines(fields or {}, _json_encoder(), processors)]
    own = LineLogger(stream) if isinstance(stream, LogThread) else None
    structlog.configure(
        processors=processors,
        wrapper_class=_Logger,
        logger_factory=structlog.WriteLoggerFactory(file=stream) if own is None else lambda *_: own,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [_handler(chosen, shared, stream)]
    logging.captureWarnings(True)
    set_level(level)
    return chosen


def set_level(level: str) -> None:
    """Log from this level on, in this process. Raises KeyError for an unknown one.

    Loggers that were used before follow, too. The processes that an engine has started keep the level that they have.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    _filter(number)
    logging.getLogger().setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


class _Logger(structlog.make_filtering_bound_logger(logging.INFO)):  # type: ignore[misc]  # a class made at run time
    """The class of all loggers. Its methods are replaced to change the level, because loggers are cached with their class."""


def _filter(number: int) -> None:
    chosen = structlog.make_filtering_bound_logger(number)
    for name, method in vars(chosen).items():
        if not name.startswith("_"):
            setattr(_Logger, name, method)


def choose_format(log_format: Format, stream: TextIO) -> Literal["console", "json"]:
    """Return the format to use on this stream: `auto` is console on a terminal, else JSON."""
    if log_format == "auto":
        return "console" if stream.isatty() else "json"
    return log_format


def wants_colour(stream: TextIO) -> bool:
    """Return True for a terminal. NO_COLOR and FORCE_COLOR (which `headrace up` sets for its parts) win."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def prepare_engine_processes(*, log_format: str, level: str) -> None:
    """Set the environment from which the processes that an engine starts configure their logging."""
    os.environ["HEADRACE_LOG_FORMAT"] = log_format
    os.environ["HEADRACE_LOG_LEVEL"] = level
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(_VLLM_CONFIG))


def engine_handler() -> logging.Handler:
    """Return the log handler of an engine's own processes. `assets/vllm_logging.json` names this function."""
    chosen = choose_format("json" if os.environ.get("HEADRACE_LOG_FORMAT") == "json" else "console", sys.stderr)
    handler = _handler(chosen, _shared_processors({"component": "engine"}, chosen), sys.stderr)
    handler.setLevel(os.environ.get("HEADRACE_LOG_LEVEL", "info").upper())
    return handler


def _shared_processors(fields: Mapping[str, str], chosen: str) -> list[Processor]:
    # A terminal shows one component, or `headrace up` puts its name in front of the line.
    console = chosen == "console"
    fields = {name: value for name, value in fields.items() if not (console and name == "component")}

    def add_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
        RepeatedErrors(),
    ]


def _renderers(chosen: str, stream: TextIO) -> list[Processor]:
    if chosen == "json":
        return [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_json_serializer()),
        ]
    return [
        structlog.dev.ConsoleRenderer(
            colors=wants_colour(stream), exception_formatter=structlog.dev.plain_traceback, sort_keys=False
        )
    ]


def _handler(chosen: str, shared: list[Processor], stream: TextIO) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(chosen, stream)],
        )
    )
    return handler


def _json_encoder() -> Callable[[object], bytes]:
    import msgspec  # here, because a log for people does without it

    return msgspec.json.Encoder(enc_hook=str).encode


def _json_serializer() -> Callable[..., str]:
    encode = _json_encoder()
    return lambda value, **_options: encode(value).decode()
