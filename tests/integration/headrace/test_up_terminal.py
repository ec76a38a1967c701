"""`headrace up` on a terminal: a handful of lines, one block at the end, and nothing over it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0
LAST = "Ctrl-C stops everything."


class Screen:
    """A `headrace up` on a pseudo terminal, and what stands on its screen."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self._raw = b""
        self._master, slave = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "NO_COLOR"))}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", "up", "--no-console", "--engine", "sim", "--port", "0", *flags],
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._master, 65536):
                self._raw += chunk
        except OSError:  # the other end is closed: the process has ended
            pass

    def text(self) -> str:
        """The screen, without colours and without live lines that were replaced."""
        lines = self._raw.decode(errors="replace").replace("\r\n", "\n").split("\n")
        return re.sub(r"\x1b\[\d*m", "", "\n".join(re.split(r"\r\x1b\[2K", line)[-1] for line in lines))

    def raw(self) -> str:
        """Everything that was written, live lines that were replaced included."""
        return self._raw.decode(errors="replace")

    def until(self, what: str, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not met():
            assert self.process.poll() is None or met(), f"up has ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"not in time: {what}:\n{self.text()}"
            time.sleep(0.02)

    def until_shown(self, text: str) -> None:
        self.until(text, lambda: text in self.text())

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / ".headrace" / "run" / "up.json").read_text())
        return state

    def logged(self) -> list[str]:
        """The names of all events in the log file."""
        lines = (self.folder / ".headrace" / "run" / "up.log").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._master)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def start(*flags: str) -> Screen:
        screens.append(Screen(tmp_path, *flags))
        return screens[-1]

    yield start
    for screen in screens:
        screen.close()


@pytest.mark.fault
def test_a_start_is_a_few_lines_and_a_block_over_which_only_a_crash_is_printed(
    up: Callable[..., Screen], tmp_path: Path
) -> None:
    (tmp_path / ".headrace").mkdir(mode=0o755)  # open to other users: it is closed, and the log says so
    screen = up()
    screen.until_shown(LAST)
    started, block = screen.text().split("Headrace is ready", 1)
    parts = re.findall(r"^  ✓ (\S+) ", started, re.MULTILINE)
    assert sorted({*parts, "router-1"}) == ["frontend", "nats-server", "router-1", "worker-1"]  # a router may be too late
    assert len(started.strip().splitlines()) == 2 + len(parts)
    assert "to start again" not in screen.raw()  # no part was there before
    state = screen.state()
    assert f"{state['url']}/v1" in block
    assert f"{state['url']}/docs" in block
    assert f"curl {state['url']}/v1/chat/completions" in block
    assert block.strip().endswith(LAST)
    # the log is somewhere else, and complete
    assert {"folder.made_private", "lease.gained", "up.ready", "worker.ready", "part.started"} <= set(screen.logged())

    os.kill(state["workers"][0]["pid"], signal.SIGKILL)
    screen.until_shown("is back after")
    after = [line.strip() for line in screen.text().split(LAST)[1].strip().splitlines()]
    assert len(after) == 2, after
    assert after[0].startswith("✗ worker-1     killed by SIGKILL, starts again in 0.5 s")
    assert after[1].startswith("✓ worker-1     is back after")

    screen.process.send_signal(signal.SIGINT)
    assert screen.process.wait(WAIT_S) == 0
    screen.until_shown("Stopped.")
    assert "starts again" not in screen.text().split("Stopping")[1]


@pytest.mark.fault
def test_a_second_interrupt_kills_and_nothing_is_called_a_crash(up: Callable[..., Screen]) -> None:
    screen = up("--grace", "600")
    screen.until_shown(LAST)
    os.kill(screen.state()["workers"][0]["pid"], signal.SIGSTOP)  # it will not drain
    screen.process.send_signal(signal.SIGINT)
    screen.until_shown("Ctrl-C again kills everything")
    screen.process.send_signal(signal.SIGINT)
    assert screen.process.wait(WAIT_S) == 0
    screen.until_shown("Stopped.")
    assert "Killing everything." in screen.text()
    assert "part.crashed" not in screen.logged()


@pytest.mark.deployment
def test_verbose_shows_the_log_instead(up: Callable[..., Screen]) -> None:
    screen = up("-v")
    screen.until_shown(LAST)
    assert "settings.loaded" in screen.text()
    assert "lease.gained" in screen.text()
    assert "✓" not in screen.text()
    assert not (screen.folder / ".headrace" / "run" / "up.log").exists()


@pytest.mark.deployment
def test_without_workers_it_says_how_one_joins(up: Callable[..., Screen]) -> None:
    screen = up("--workers", "0")
    screen.until_shown("no worker")
    screen.until("the frontend listens", lambda: "✓ frontend" in screen.text())
    assert f"headrace worker --nats {screen.state()['nats']['url']}" in screen.text()
    assert "waiting for a worker that answers requests to join" in screen.text()
