"""`headrace chat` beside a `headrace up`: one answer through pipes, and a conversation on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.up_process import RunningUp, routed_up

pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with routed_up(tmp_path_factory.mktemp("up"), "--engine-arg", "mean_output_tokens=12") as running:
        yield running


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "headrace", "chat", *words]


def test_one_answer_is_printed_where_there_is_no_terminal(up: RunningUp) -> None:
    folder = up.run_file.parents[2]
    done = subprocess.run(
        command("Say this:"), input="hello", cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    text, figures = done.stdout.strip().rsplit("\n", 1)
    assert text
    assert "first token" in figures
    assert "worker-1" in figures
    wrong = subprocess.run(
        command("x", "--model", "nine"), cwd=folder, capture_output=True, text=True, timeout=60, check=False, input=""
    )
    assert (wrong.returncode, "no model 'nine' is served; served: sim" in wrong.stderr) == (1, True)


def test_a_deployment_that_is_not_there_is_named(tmp_path: Path) -> None:
    words = command("x", "--url", "http://127.0.0.1:9")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, input="")
    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stderr


def test_a_conversation_on_a_terminal(up: RunningUp) -> None:
    main, side = pty.openpty()
    process = subprocess.Popen(command(), cwd=up.run_file.parents[2], stdin=side, stdout=side, stderr=side, close_fds=True)
    os.close(side)
    shown = ""

    def until(words: str, times: int = 1) -> None:
        nonlocal shown
        deadline = time.monotonic() + 30
        while shown.count(words) < times:
            assert time.monotonic() < deadline, shown
            shown += os.read(main, 4096).decode(errors="replace")

    try:
        until("sim at http://127.0.0.1")
        until("> ")
        os.write(main, b"hello\n")
        until("in the answer")
        until("> ", 2)
        os.write(main, b"/help\n")
        until("/system")
        until("> ", 3)  # the end of input counts while a line is read: one that comes before is lost
        os.write(main, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
