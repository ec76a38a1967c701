"""Lines of a JSON log that are made in one step."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import structlog
from structlog.typing import EventDict, WrappedLogger

from headrace.base import logs
from headrace.base.logs import JsonLines, LineLogger, LogThread


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


FIELDS = {"component": "frontend", "worker": "w-1"}


def refused(_logger: WrappedLogger, _method: str, _event: EventDict) -> EventDict:
    raise AssertionError("made in steps")


def in_steps() -> list[Any]:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        for name, value in FIELDS.items():
            event.setdefault(name, value)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]


def encoder() -> Callable[[Any], bytes]:
    return msgspec.json.Encoder(enc_hook=str).encode


@pytest.mark.parametrize("method", ["debug", "info", "warn", "warning", "error", "exception", "critical"])
def test_a_line_has_the_fields_of_one_that_is_made_in_steps_in_their_order(method: str) -> None:
    event = {"route": "/v1", "worker": "w-own", "seconds": 0.25, "event": "request.answered"}
    lines = JsonLines(FIELDS, encoder(), [refused])
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        made, expected = json.loads(lines(None, method, dict(event))), None
        for step in in_steps():
            expected = step(None, method, dict(event) if expected is None else expected)
    expected = json.loads(str(expected))
    assert list(made) == list(expected)
    assert made | {"timestamp": ""} == expected | {"timestamp": ""}
    assert made["request_id"] == "r-1"


def test_lines_reach_a_thread_whole_and_with_all_names_of_levels() -> None:
    stream = io.StringIO()
    logs.configure(log_format="json", level="debug", fields=FIELDS, stream=LogThread(stream))  # type: ignore[arg-type]
    log = structlog.get_logger()
    for method in ("debug", "info", "warning", "error", "critical"):
        getattr(log, method)("a.line", number=1)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("a.crash")
    assert isinstance(log.bind()._logger, LineLogger)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["debug", "info", "warning", "error", "critical", "error"]
    assert all(line["component"] == "frontend" for line in lines)
    assert "ValueError: broken" in lines[-1]["exception"]
