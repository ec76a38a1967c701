"""The log's lines of requests, as any other line of the log is written."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from headrace.base import logs
from headrace.base.logs import LogThread
from headrace.frontend.http.middleware import AccessLog


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


FIELDS = {"route": "/v1/chat/completions", "status": 200, "workers": ["w-1"], "seconds": 0.25}


@pytest.mark.parametrize("format_", ["json", "console"])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_line_is_that_of_structlog_s_own_methods(format_: logs.Format, *, threaded: bool) -> None:
    stream = io.StringIO()
    out = LogThread(stream) if threaded else stream
    logs.configure(log_format=format_, fields={"component": "frontend"}, stream=out)  # type: ignore[arg-type]
    lines = AccessLog()
    assert lines.takes(logging.INFO)
    lines.write(logging.INFO, dict(FIELDS))
    structlog.get_logger().info("request.answered", **FIELDS)
    ours, theirs = stream.getvalue().splitlines()
    if format_ == "json":
        assert list(json.loads(ours)) == list(json.loads(theirs))
        assert json.loads(ours) | {"timestamp": ""} == json.loads(theirs) | {"timestamp": ""}
    else:
        assert ours.split(" ", 1)[1] == theirs.split(" ", 1)[1]


def test_the_level_of_the_log_decides_also_when_it_changes() -> None:
    stream = io.StringIO()
    logs.configure(log_format="json", level="info", stream=stream)
    lines = AccessLog()
    assert (lines.takes(logging.DEBUG), lines.takes(logging.INFO)) == (False, True)
    logs.set_level("debug")
    assert lines.takes(logging.DEBUG)
    lines.write(logging.DEBUG, dict(FIELDS))
    assert json.loads(stream.getvalue())["level"] == "debug"
    logs.set_level("warning")
    assert not lines.takes(logging.INFO)
