"""The threads of a real PyTorch in a core that is forked after its worker has computed (`workers/vllm/start.py`)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

# A worker whose processor computes before the fork, and a core that computes after it. Both tell what they compute with.
WORKER = """
import os, signal, threading, time, torch
from headrace.workers.vllm.start import forked_core

def compute():
    before = len(os.listdir("/proc/self/task"))
    torch.ones(4_000_000).mul_(2.0)
    return torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before

def start():
    with forked_core(os.environ):
        told = [compute()]
        core = os.fork()
        if core == 0:
            print("core", *compute(), os.environ["OMP_NUM_THREADS"], flush=True)
            os._exit(0)
        until = time.monotonic() + 60
        while not (ended := os.waitpid(core, os.WNOHANG)[0]) and time.monotonic() < until:
            time.sleep(0.05)
        if not ended:
            os.kill(core, signal.SIGKILL)
        told.append(compute())
    print("worker", *(number for one in told for number in one), os.environ["OMP_NUM_THREADS"])

thread = threading.Thread(target=start)
thread.start()
thread.join()
"""


def test_a_core_computes_with_all_its_threads_though_its_worker_has_computed_before() -> None:
    """A core that has its worker's threads in its books waits for them for ever, and tells nothing."""
    environ = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", WORKER]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [
        "core 2 1 2",  # two threads, one of them new, and what vLLM in the core reads of them
        "worker 1 0 2 1 2",  # alone before the fork, then with two
    ], done.stderr
