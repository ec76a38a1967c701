"""Lines of a JSON log that are made in one step."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import structlog
from structlog.typing import EventDict, WrappedLogger

from headrace.base import logs
from headrace.base.logs import Clock, JsonLines, LineLogger, LogThread


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


@pytest.mark.parametrize("given", [{"exc_info": ValueError("broken")}, {"stack_info": True}])
def test_a_line_with_a_traceback_goes_through_all_steps(given: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="made in steps"):
        JsonLines(FIELDS, encoder(), [refused])(None, "error", {"event": "failed", **given})
    line = json.loads(
        JsonLines(FIELDS, encoder(), in_steps())(None, "error", {"event": "failed", "exc_info": ValueError("broken")})
    )
    assert "ValueError: broken" in line["exception"]
    assert line["worker"] == "w-1"


@pytest.mark.parametrize("ns", [0, 1_000, 1_764_172_800_000_000_999, 1_764_172_800_123_456_789, 1_764_172_801_999_999_999])
def test_the_time_is_written_as_datetime_writes_it(ns: int) -> None:
    seconds, rest = divmod(ns, 1_000_000_000)
    expected = datetime.fromtimestamp(seconds, tz=UTC).replace(microsecond=rest // 1000).isoformat().replace("+00:00", "Z")
    assert Clock(lambda: ns).now() == expected


def test_a_clock_notices_the_next_second() -> None:
    times = iter([1_000_000_000, 1_500_000_000, 2_000_001_000])
    clock = Clock(lambda: next(times))
    assert [clock.now() for _ in range(3)] == [
        "1970-01-01T00:00:01Z",
        "1970-01-01T00:00:01.500000Z",
        "1970-01-01T00:00:02.000001Z",
    ]


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
