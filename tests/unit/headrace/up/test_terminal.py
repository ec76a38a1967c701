"""What a person sees of a start, of crashes and of a stop: a handful of lines, and nothing that means nothing."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config.settings import load
from headrace.up.terminal import LogFile, ShortTerminal, ShortView, Style, open_short_terminal


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


def test_lines_are_appended_over_runs(tmp_path: Path) -> None:
    for line in ("one", "two"):
        log = LogFile(tmp_path / "run" / "up.log")
        assert log.write(line)
        log.close()
    assert (tmp_path / "run" / "up.log").read_text() == "one\ntwo\n"


def test_a_full_file_makes_room_for_a_new_one_and_is_kept_once(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "up.log", most_bytes=8)
    for number in range(6):
        assert log.write(f"line {number}")
    log.close()
    assert (tmp_path / "up.log").read_text() == "line 4\nline 5\n"
    assert (tmp_path / "up.log.1").read_text() == "line 2\nline 3\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["up.log", "up.log.1"]


def test_what_cannot_be_written_is_counted_and_later_lines_are_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    log = LogFile(tmp_path / "run" / "up.log")
    assert not log.write("lost")
    assert (log.lost, log.error) == (1, "File exists")
    (tmp_path / "run").unlink()
    assert log.write("kept")
    log.close()
    assert (tmp_path / "run" / "up.log").read_text() == "kept\n"


class _Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen() -> _Tty:
    return _Tty()


@pytest.fixture
def log(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "up.log")  # its terminal closes it


@pytest.fixture
def terminal(screen: _Tty, log: LogFile) -> Iterator[ShortTerminal]:
    opened = ShortTerminal(screen, view=ShortView(style=Style()), log=log)
    yield opened
    opened.close()


def test_all_lines_go_to_the_file_and_few_to_the_screen(terminal: ShortTerminal, screen: _Tty, log: LogFile) -> None:
    terminal.write('{"event":"server.started","url":"nats://x"}\n{"event":"lease.gained"}\n')
    terminal.part_lines("worker-1", ["Triton is not installed"])
    assert [json.loads(line)["event"] for line in log.path.read_text().splitlines()] == [
        "server.started",
        "lease.gained",
        "part.output",
    ]
    assert len(screen.getvalue().splitlines()) == 1
    assert "nats://x" in screen.getvalue()


def test_a_line_pushes_the_live_line_down(terminal: ShortTerminal, screen: _Tty) -> None:
    terminal.waiting("waiting for the engine", 0.0)
    terminal.write('{"event":"server.started","url":"nats://x"}\n')
    shown, live = screen.getvalue().split("\r\x1b[2K")[2].split("\n")
    assert "nats://x" in shown
    assert "waiting for the engine" in live


def test_the_live_line_is_cut_where_the_terminal_ends(
    terminal: ShortTerminal, screen: _Tty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal.waiting("waiting for something with a long name", 0.0)
    assert len(screen.getvalue().removeprefix("\r\x1b[2K")) == 19


def test_a_log_that_cannot_be_written_is_said_once(screen: _Tty, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    terminal = ShortTerminal(screen, view=ShortView(style=Style()), log=LogFile(tmp_path / "run" / "up.log"))
    terminal.part_lines("worker-1", ["one"])
    terminal.part_lines("worker-1", ["two"])
    assert screen.getvalue().count("cannot be written: File exists") == 1


async def test_it_waits_for_parts_to_be_ready_but_not_for_ever(terminal: ShortTerminal) -> None:
    waiting = asyncio.create_task(terminal.settle(["router-1"], one_of=["worker-1", "worker-2"], timeout_s=30))
    for part, event in (("router-1", "router.ready"), ("worker-2", "worker.ready")):
        await asyncio.sleep(2 * terminal.STATUS_EVERY_S)
        assert not waiting.done()
        terminal.part_lines(part, [json.dumps({"event": event})])
    await asyncio.wait_for(waiting, 10)
    await terminal.settle(["router-1"], one_of=[], timeout_s=30)
    await terminal.settle(["router-2"], one_of=[], timeout_s=0.001)


def test_it_opens_with_a_line_that_names_the_log(screen: _Tty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    terminal = open_short_terminal(load("up", flags={"worker.engine": "sim"}), screen)
    assert "its log is .headrace/run/up.log" in screen.getvalue()
    terminal.write('{"event":"server.started","url":"nats://x"}\n')
    terminal.close()
    assert (tmp_path / ".headrace" / "run" / "up.log").is_file()
