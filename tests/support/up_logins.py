"""Commands and the server's log beside a `headrace up` whose NATS server asks for logins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.up_process import RunningUp

TIMEOUT_S = 60.0


def folder_of(up: RunningUp) -> Path:
    return up.run_file.parents[2]


def headrace(up: RunningUp, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-P", "-m", "headrace", *words]
    done = subprocess.run(
        command, cwd=folder_of(up), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def violations(up: RunningUp) -> list[str]:
    """What the server has refused since it was started."""
    log = folder_of(up) / ".headrace" / "nats" / "nats-server.log"
    return [line for line in log.read_text().splitlines() if "Violation" in line]
