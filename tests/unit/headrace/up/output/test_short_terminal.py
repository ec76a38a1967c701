"""The short terminal: few lines on the screen, all of them in the file."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config.settings import load
from headrace.up.output.log_file import LogFile
from headrace.up.output.short_terminal import ShortTerminal, open_short_terminal
from headrace.up.output.short_view import ShortView, Style


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
