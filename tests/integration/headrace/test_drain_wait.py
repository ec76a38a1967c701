"""`headrace worker drain --wait` returns when the worker has left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


def test_a_drain_that_is_waited_for_returns_when_the_worker_has_left(tmp_path: Path) -> None:
    up = RunningUp(tmp_path)
    try:
        up.until("the worker serves", lambda: bool(up.events("worker.ready")))
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headrace", "worker", "drain", "worker-1", "--wait"],
            env={**os.environ, **up.environment()},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"(worker-1-\S+) drains.*\n\1 is gone\n", done.stdout)
        assert not list(up.events("part.crashed"))
    finally:
        up.stop()
