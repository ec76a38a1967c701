"""What a person sees of a start, of crashes and of a stop: a handful of lines, and nothing that means nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from headrace.up.output.short_view import ShortView, Style


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> ShortView:
    return ShortView(style=Style(), clock=clock)


def told(view: ShortView, part: str, event: str, /, **fields: object) -> str | None:
    line = view.line(part, json.dumps({**fields, "event": event, "level": "info"}, separators=(",", ":")))
    return None if line is None else re.sub(r"\s+", " ", line.strip())


def start(view: ShortView, clock: Clock) -> Iterator[str | None]:
    clock.now_s += 0.25
    yield told(view, "up", "server.started", url="nats://127.0.0.1:4711", pid=1)
    yield told(view, "up", "part.started", part="frontend", pid=2)
    yield told(view, "frontend", "lease.gained", key="ingress.x")
    clock.now_s += 0.5
    yield told(view, "frontend", "frontend.listening", url="http://127.0.0.1:8000")
    clock.now_s += 15
    yield told(view, "worker-1", "worker.ready", engine="sim", model="m", worker="worker-1-x", pool="p")
    yield told(view, "router-1", "kv.strangers_dropped", pool="p", workers=[])
    yield told(view, "router-1", "router.ready", workers=1)
    yield told(view, "up", "up.ready", url="http://127.0.0.1:8000")


def test_a_start_is_one_line_for_each_part(view: ShortView, clock: Clock) -> None:
    assert [line for line in start(view, clock) if line] == [
        "✓ nats-server nats://127.0.0.1:4711 0.2 s",
        "✓ frontend http://127.0.0.1:8000 0.8 s",
        "✓ worker-1 sim serves m 15.8 s",
        "✓ router-1 places requests",
    ]
    assert view.ready == {"nats-server", "frontend", "worker-1", "router-1"}


def test_after_the_start_only_a_crash_and_the_return_are_shown(view: ShortView, clock: Clock) -> None:
    list(start(view, clock))
    assert told(view, "worker-2", "worker.ready", engine="sim", model="m") is None
    assert told(view, "frontend", "request.answered", status=200) is None
    assert told(view, "worker-1", "part.output", line="Triton is not installed") is None
    assert told(view, "up", "part.crashed", part="worker-1", exit_code=-9, restart_in_s=0.5, crashes=1) == (
        "✗ worker-1 killed by SIGKILL, starts again in 0.5 s"
    )
    assert "worker-1" not in view.ready
    clock.now_s += 1.25
    assert told(view, "worker-1", "worker.ready", engine="sim", model="m") == "✓ worker-1 is back after 1.2 s"
    assert told(view, "up", "part.crashed", part="nats", restart_in_s=0.5) == "✗ nats-server has ended, starts again in 0.5 s"
    assert told(view, "up", "server.started", url="nats://127.0.0.1:4711") == "✓ nats-server is back after 0.0 s"


def test_a_crash_with_a_code_says_the_last_words(view: ShortView) -> None:
    assert told(view, "up", "part.crashed", part="worker-1", exit_code=1, restart_in_s=2.0, error="no room") == (
        "✗ worker-1 ended with code 1, starts again in 2 s: no room"
    )


def test_a_part_that_crashes_twice_is_back_after_the_whole_time(view: ShortView, clock: Clock) -> None:
    told(view, "up", "part.crashed", part="frontend", exit_code=1, restart_in_s=1)
    clock.now_s += 2
    told(view, "up", "part.crashed", part="frontend", exit_code=1, restart_in_s=2)
    clock.now_s += 3
    assert told(view, "frontend", "frontend.listening", url="u") == "✓ frontend is back after 5.0 s"


def test_a_server_that_is_started_again_says_why_and_a_run_file_only_once(view: ShortView, clock: Clock) -> None:
    assert told(view, "up", "nats.restarting", reason="it stores nothing") == "✗ nats-server starts again: it stores nothing"
    clock.now_s += 2
    assert told(view, "up", "server.started", url="u") == "✓ nats-server is back after 2.0 s"
    assert told(view, "up", "up.run_file_not_written", error="No space left on device") == (
        "✗ run file cannot be written: No space left on device"
    )
    assert told(view, "up", "up.run_file_not_written", error="No space left on device") is None


def test_a_part_that_leaves_says_why(view: ShortView) -> None:
    assert told(view, "up", "part.left", part="worker-1", reason="drained") == "· worker-1 is drained and has left"
    assert told(view, "up", "part.left", part="worker-1", reason="configuration", error="no model") == (
        "✗ worker-1 cannot start: no model"
    )
    assert told(view, "up", "part.left", part="worker-1", reason="asked") is None


def test_a_failure_that_ends_up_is_left_to_the_last_line(view: ShortView) -> None:
    assert told(view, "up", "part.left", part="worker-1", reason="configuration", error="no model", fatal=True) is None
    assert told(view, "up", "up.stopping", grace_s=15.0, failed=True) is None


def test_the_model_is_shown_while_it_is_prepared_and_when_it_is(view: ShortView, clock: Clock) -> None:
    assert view.waiting("waiting for the engine").split() == ["⠋", "worker", *["waiting", "for", "the", "engine"], "0.0", "s"]
    assert told(view, "model", "model.preparing", step="downloading, 5 of 93 MB …") is None
    clock.now_s += 3
    assert view.waiting("preparing").split()[1:] == ["model", *["downloading,", "5", "of", "93", "MB", "3.0", "s"]]
    assert told(view, "model", "model.prepared", name="small") == "✓ model small 3.0 s"
    assert "downloading" not in view.waiting("waiting")


def test_the_live_line_says_whom_a_start_waits_for(view: ShortView) -> None:
    told(view, "prefill-1", "worker.ready", model="m")
    assert " worker " in view.waiting("waiting for the engine (sim) to load")
    told(view, "worker-1", "worker.ready", model="m")
    assert " frontend     waiting until it knows the workers " in view.waiting("waiting for the engine (sim) to load")
    told(view, "up", "part.crashed", part="worker-1", exit_code=1, restart_in_s=0.5)
    assert " worker " in view.waiting("waiting for the engine (sim) to load")


def test_a_download_from_a_hub_is_shown_until_it_stops_growing(view: ShortView) -> None:
    assert told(view, "worker-1", "model.downloading", model="org/m", arrived_mb=150) is None
    assert "downloading org/m, 150 MB so far" in view.waiting("waiting for the engine")
    assert told(view, "worker-1", "model.downloading", model="org/m", done=True) is None
    assert "waiting for the engine" in view.waiting("waiting for the engine")


def test_a_stop_is_said_and_parts_that_end_then_are_not(view: ShortView) -> None:
    assert "15 s at most" in str(told(view, "up", "up.stopping", grace_s=15.0))
    assert told(view, "worker-1", "worker.ready", engine="sim", model="m") is None
    assert told(view, "up", "up.killing") == "Killing everything."
    assert told(view, "up", "up.stopped") == "Stopped."


def test_without_workers_it_says_how_one_joins(view: ShortView) -> None:
    line = told(view, "up", "up.no_workers", meaning="…", join="headrace worker --nats nats://127.0.0.1:4711")
    assert line == "· no worker is started here. To add one: headrace worker --nats nats://127.0.0.1:4711"


def test_a_variable_that_is_no_setting_is_shown_once(view: ShortView) -> None:
    assert told(view, "up", "settings.unknown", detail="unknown environment variable HEADRACE_X") is not None
    assert told(view, "worker-1", "settings.unknown", detail="unknown environment variable HEADRACE_X") is None


@pytest.mark.parametrize(
    "line", ["", "plain text", "{", '{"event":', '{"event":"nothing.known"}', '{"other":"worker.ready"}', "[1]"]
)
def test_any_line_can_come(view: ShortView, line: str) -> None:
    assert view.line("worker-1", line) is None


def test_a_terminal_without_unicode_gets_plain_marks_and_a_colourful_one_colours(clock: Clock) -> None:
    plain = ShortView(style=Style(unicode=False), clock=clock)
    assert "+ nats-server" in str(told(plain, "up", "server.started", url="u"))
    assert plain.waiting("x").isascii()
    colourful = ShortView(style=Style(colour=True), clock=clock)
    assert "\x1b[32m✓\x1b[0m" in str(told(colourful, "up", "server.started", url="u"))
