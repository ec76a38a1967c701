"""Which processes of a deployment are measured, and under which names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headrace.tools.serve_bench.processes import processes_of

_WAITS = "import sys; sys.stdin.read()"


@contextmanager
def running(*commands: str) -> Iterator[list[int]]:
    """Run children whose command lines have these words."""
    with ExitStack() as stack:
        pids = []
        for command in commands:
            child = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", _WAITS, *command.split()], stdin=subprocess.PIPE)
            )
            stack.callback(child.kill)
            pids.append(child.pid)
        deadline = time.monotonic() + 30
        while not all(_WAITS.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):  # not executed yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield pids


def found_here() -> dict[str, int]:
    """The children of this process, without the nats-server that other tests of the same run may use."""
    return {name: pid for name, pid in processes_of(Path(), os.getpid()).items() if name != "nats-server"}


def test_one_frontend_has_the_plain_name() -> None:
    with running("frontend --port 1", "router", "worker") as (frontend, router, worker):
        found = found_here()
    assert found == {"frontend": frontend, "router-1": router, "worker-1": worker}


def test_each_of_several_frontends_is_measured() -> None:
    with running("frontend --port 1", "frontend --port 1") as frontends:
        found = found_here()
    assert found == {"frontend-1": min(frontends), "frontend-2": max(frontends)}
