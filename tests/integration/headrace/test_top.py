"""`headrace top` beside a `headrace up`: live in a terminal of 80 by 24, once, and as JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.headrace.test_operator_commands import headrace
from tests.support.up_process import RunningUp, routed_up

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(300)]

WITHIN_S = 60.0
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class TerminalSession:
    """`headrace top` in a pseudo-terminal."""

    def __init__(self, folder: Path, *flags: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        before = termios.tcgetattr(slave)
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", "top", "--interval", "0.2", *flags],
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=clean | {"TERM": "xterm-256color"} | env,
            start_new_session=True,
        )
        self._slave, self._before = slave, before
        self.raw = ""

    def until(self, met: Callable[[str], bool]) -> str:
        """Read until what was drawn meets a condition."""
        deadline = time.monotonic() + WITHIN_S
        while not met(self.raw):
            assert time.monotonic() < deadline, self.raw[-2000:]
            if select.select([self._master], [], [], 0.2)[0]:
                self.raw += os.read(self._master, 65536).decode()
        return self.raw

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def frames(self) -> list[list[str]]:
        """The screens that were drawn whole, as plain lines."""
        whole = self.raw.split("\x1b[H")[1:-1]
        return [CODES.sub("", frame).split("\r\n") for frame in whole]

    def ended(self) -> int:
        code = self.process.wait(WITHIN_S)
        while select.select([self._master], [], [], 0.2)[0]:
            self.raw += os.read(self._master, 65536).decode()
        assert termios.tcgetattr(self._slave) == self._before, "the terminal is as it was"
        os.close(self._slave)
        os.close(self._master)
        return code


def folder_of(up: RunningUp) -> Path:
    return up.run_file.parents[2]


def until_told(folder: Path, *flags: str, met: Callable[[str], bool]) -> str:
    """What `headrace top` prints, once it is as wanted: load reports of a busy machine may be late for a while."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        done = headrace(folder, "top", *flags)
        assert done.returncode == 0, done.stderr
        if met(done.stdout):
            return done.stdout
        assert time.monotonic() < deadline, done.stdout


def test_a_terminal_shows_the_deployment_until_q_is_pressed(tmp_path: Path) -> None:
    with routed_up(tmp_path, "--workers", "2", "--routers", "1") as up:
        session = TerminalSession(folder_of(up))
        session.until(lambda raw: raw.count("2 of 2 workers serving") >= 2)
        session.press("s")
        session.press("q")
        assert session.ended() == 0
        assert session.raw.startswith("\x1b[?1049h")
        assert session.raw.rstrip().endswith("\x1b[?1049l")
        frames = session.frames()
        assert max(map(len, frames)) <= 24
        assert max(len(line) for frame in frames for line in frame) <= 80
        texts = ["\n".join(frame) for frame in frames]
        assert any(
            re.search(r"1 frontend, 1 router, 2 of 2 workers serving", text)
            and len(re.findall(r"agg +serving +0/\d+ +0 ", text)) == 2
            and re.search(r"^stored: REQ 0  MOVED 0  WORK 0", text, re.MULTILINE)
            for text in texts
        ), texts[-1]
        assert "\x1b[1m" in session.raw, "headings stand out"
        plain = TerminalSession(folder_of(up), NO_COLOR="1")
        plain.until(lambda raw: raw.count("2 of 2 workers serving") >= 2)
        plain.press("q")
        assert plain.ended() == 0
        assert "\x1b[1m" not in plain.raw
        for flags in (("--once",), ()):
            text = until_told(folder_of(up), *flags, met=lambda text: "2 of 2 workers serving" in text)
            assert "\x1b" not in text
        found = json.loads(until_told(folder_of(up), "--json", met=lambda text: text.count('"serving"') == 2))
        assert [(row["running"], row["role"]) for row in found["workers"]] == [(0, "aggregated")] * 2
        assert {row["stream"]: row["messages"] for row in found["streams"]}["DLQ"] == 0
        bad = headrace(folder_of(up), "top", "--interval", "0")
        assert bad.returncode != 0
        assert "--interval must be between 0.2 and 3600 seconds, got 0" in bad.stderr
