"""The deployment of a benchmark ends with the benchmark, also when that is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.deployment import Deployment

with Deployment(Path(sys.argv[1]), int(sys.argv[2]), 1) as deployment:
    print(deployment.pid, flush=True)
    time.sleep(120)
"""


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "XZ"


def test_a_killed_benchmark_leaves_no_deployment(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _BENCHMARK, str(tmp_path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        try:
            assert benchmark.stdout is not None
            up = int(benchmark.stdout.readline())
            assert _runs(up)
        finally:
            benchmark.kill()
    end = time.monotonic() + 60
    try:
        while _runs(up):
            assert time.monotonic() < end, "`headrace up` still runs"
            time.sleep(0.05)
    finally:
        if _runs(up):
            os.kill(up, signal.SIGTERM)
