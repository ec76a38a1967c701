"""Configures the logging of a Headrace process: structlog, and the libraries' stdlib logging through it.

`configure` is called once per process, by the command line only.  Lines go to stderr: coloured text on a terminal, one JSON
object per line otherwise.  Every line carries the component and, where bound, worker and request (structlog contextvars).
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from headrace.config.settings import Settings
from headrace.log_lines import JsonLines, LineLogger
from headrace.log_thread import LogThread
from headrace.repeated_errors import RepeatedErrors

Format = Literal["auto", "console", "json"]

_VLLM_CONFIG = Path(__file__).parent / "assets" / "vllm_logging.json"

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


def configure_tool(settings: Settings) -> None:
    """Configure logging for a command that prints an answer and ends: only warnings, unless more was asked for."""
    level = settings["log.level"] if settings.given("log.level") else "warning"
    configure(log_format=settings["log.format"], level=level, fields={"component": settings.command})


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
