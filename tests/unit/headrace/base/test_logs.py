"""Logging as the command line sets it up."""

from __future__ import annotations

import io
import json
import logging
import logging.config
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from headrace.base import logs


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_component_worker_and_request() -> None:
    stream = io.StringIO()
    logs.configure(log_format="json", fields={"component": "worker", "worker": "w-1"}, stream=stream)
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        structlog.get_logger().info("job.started", slots=3, folder=Path("x"))
        logging.getLogger("uvicorn.error").warning("hello %s", "there")
    first, second = _lines(stream)
    for line in (first, second):
        assert (line["component"], line["worker"], line["request_id"]) == ("worker", "w-1", "r-1")
    assert (first["event"], first["level"], first["slots"], first["folder"]) == ("job.started", "info", 3, "x")
    assert (second["event"], second["level"], second["logger"]) == ("hello there", "warning", "uvicorn.error")
    assert str(first["timestamp"]).endswith("Z")


def test_auto_is_json_where_nobody_looks() -> None:
    assert logs.configure(log_format="auto", stream=io.StringIO()) == "json"


def test_a_level_can_be_changed_for_loggers_that_were_used_before() -> None:
    stream = io.StringIO()
    logs.configure(log_format="json", level="info", stream=stream)
    ours = structlog.get_logger().bind()
    ours.debug("a.before")
    logs.set_level("debug")
    ours.debug("a.debug")
    logging.getLogger("library").debug("debug")
    logs.set_level("error")
    ours.warning("a.after")
    logging.getLogger("library").warning("after")
    assert [line["event"] for line in _lines(stream)] == ["a.debug", "debug"]
    with pytest.raises(KeyError):
        logs.set_level("loud")


def test_the_level_holds_for_both_kinds_of_logger() -> None:
    stream = io.StringIO()
    logs.configure(log_format="json", level="warning", stream=stream)
    structlog.get_logger().info("a.quiet")
    logging.getLogger("library").info("quiet")
    structlog.get_logger().warning("a.loud")
    logging.getLogger("library").warning("loud")
    assert [line["event"] for line in _lines(stream)] == ["a.loud", "loud"]


def test_an_exception_stays_on_one_json_line() -> None:
    stream = io.StringIO()
    logs.configure(log_format="json", stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger().exception("job.failed")
        logging.getLogger("library").exception("failed")
    assert ["boom" in str(line["exception"]) for line in _lines(stream)] == [True, True]


def test_console_lines_are_for_people() -> None:
    stream = io.StringIO()
    logs.configure(log_format="console", fields={"component": "up"}, stream=stream)
    structlog.get_logger().info("up.ready", url="http://x")
    text = stream.getvalue()
    assert "up.ready" in text
    assert "url=http://x" in text
    assert "\x1b[" not in text
    assert "component" not in text


def test_an_engine_that_configures_logging_itself_ends_up_in_the_same_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HEADRACE_LOG_FORMAT", "HEADRACE_LOG_LEVEL", "VLLM_LOGGING_CONFIG_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    logs.prepare_engine_processes(log_format="json", level="info")
    import os

    logging.config.dictConfig(json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text()))
    try:
        logging.getLogger("vllm.engine").info("loading %d weights", 3)
    finally:
        logging.getLogger("vllm").handlers.clear()
        logging.getLogger("vllm").propagate = True
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["component"], line["logger"]) == ("loading 3 weights", "engine", "vllm.engine")


class FullDisk(io.StringIO):
    """A file on a disk that can be full."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            super().write(text[:5])  # as much as there was room for
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_log_on_a_full_disk_ends_nothing_and_says_afterwards_what_is_missing() -> None:
    disk = FullDisk()
    logs.configure(log_format="json", stream=logs.LogStream(disk))
    structlog.get_logger().warning("one")
    logging.getLogger("library").warning("two")
    disk.full = False
    structlog.get_logger().warning("three")
    lines = [json.loads(line) for line in disk.getvalue().splitlines()[-2:]]
    assert [(line["event"], line.get("writes")) for line in lines] == [("log.lost", 2), ("three", None)]
