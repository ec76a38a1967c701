"""Errors that repeat: the first have tracebacks, further ones a line, the rest are counted."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import structlog

from headrace.base import logs
from headrace.base.logs import LINES, TRACEBACKS, WINDOW_S, RepeatedErrors


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def said(sampled: RepeatedErrors, count: int, error: Exception, event: str = "callback.failed") -> list[dict[str, Any]]:
    lines = []
    for n in range(count):
        try:
            lines.append(dict(sampled(None, "error", {"event": event, "exc_info": error, "n": n})))
        except structlog.DropEvent:
            continue
    return lines


def test_a_flood_keeps_its_first_tracebacks_and_lines_and_the_next_window_says_what_is_missing() -> None:
    clock = Clock()
    sampled = RepeatedErrors(clock)
    lines = said(sampled, 1000, ValueError("x"))
    assert len(lines) == LINES
    assert ["exc_info" in line for line in lines] == [True] * TRACEBACKS + [False] * (LINES - TRACEBACKS)
    assert lines[-1]["error"] == "ValueError"
    clock.now_s += WINDOW_S
    first, second = said(sampled, 2, ValueError("x"))
    assert first["left_out"] == 900
    assert "exc_info" in first
    assert "left_out" not in second


def test_other_errors_and_other_events_have_lines_of_their_own() -> None:
    sampled = RepeatedErrors(Clock())
    said(sampled, 1000, ValueError("x"))
    assert "exc_info" in said(sampled, 1, KeyError("x"))[0]
    assert "exc_info" in said(sampled, 1, ValueError("x"), event="message.failed")[0]
    plain = {"event": "callback.failed", "error": "no traceback"}
    assert all(sampled(None, "error", dict(plain)) == plain for _ in range(1000))


def test_it_remembers_a_bounded_number_of_kinds() -> None:
    clock = Clock()
    sampled = RepeatedErrors(clock)
    for n in range(5000):
        said(sampled, 1, ValueError("x"), event=f"e{n}")
        clock.now_s += 0.001
    assert len(sampled._counts) <= 1024
    assert len(sampled._left_out) <= 1024


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_the_log_of_a_process_is_sampled_so(log_format: Any) -> None:
    stream = io.StringIO()
    logs.configure(log_format=log_format, stream=stream)
    try:
        log = structlog.get_logger()
        for _ in range(2000):
            try:
                raise RuntimeError("each message meets it")
            except RuntimeError:
                log.exception("callback.failed", subject="s")
        text = stream.getvalue()
        assert text.count("Traceback") == TRACEBACKS
        assert text.count("callback.failed") == LINES
        assert len(text) < 60_000
        if log_format == "json":
            assert all(json.loads(line)["level"] == "error" for line in text.splitlines())
    finally:
        structlog.reset_defaults()
