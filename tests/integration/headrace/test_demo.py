"""`headrace demo` as it is typed: the sentence goes on, and nothing is left behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.demo import ANSWER

pytestmark = pytest.mark.fault

TIMEOUT_S = 90.0


def demo(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace", "demo", "--speed", "3"],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left(folder: Path) -> list[str]:
    """Processes that work below the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                str(folder) in os.readlink(process / "cwd")
                and (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            ):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return found


def nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while (found := left(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == []


def test_the_sentence_goes_on_and_is_compared_and_everything_is_cleaned_up(tmp_path: Path) -> None:
    process = demo(tmp_path)
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, said
    assert "\x1b" not in said
    text = " ".join(line.strip() for line in said.splitlines() if line.startswith("    ")).split("killed (pid")[0]
    assert ANSWER in text
    assert "kill -9" in said
    assert "no token lost, none twice" in said
    assert "BROKEN" not in said
    nothing_is_left(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_of_one_that_is_interrupted(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = demo(tmp_path)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and "»" not in line:
        pass
    assert len(left(tmp_path)) >= 5  # up, nats-server, frontend, router, workers
    process.send_signal(number)
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, said
    assert "Traceback" not in said
    nothing_is_left(tmp_path)
    if number != signal.SIGKILL:
        assert "everything is stopped" in said
        assert list(tmp_path.iterdir()) == []
