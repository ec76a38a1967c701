"""Whatever kills a worker, nothing it started may live on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.workers.process_guard import ProcessTree

pytestmark = pytest.mark.fault

# A worker whose "engine" is a process with a child of its own; the grandchild ignores everything it can ignore.
WORKER = """
import os, signal, subprocess, sys, time
from headrace.workers.process_guard import TreeGuard
guard = TreeGuard()
if "unguarded" not in sys.argv:
    guard.start()
if "fork" in sys.argv:
    forked = os.fork()
    if forked == 0:
        time.sleep(300)
    print(forked, flush=True)
engine = subprocess.Popen(
    [sys.executable, "-c", '''
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time, signal; signal.signal(15, 1); time.sleep(300)"])
print(child.pid, flush=True)
time.sleep(300)
'''], stdout=subprocess.PIPE, text=True)
child = int(engine.stdout.readline())
print(child, flush=True)
print(engine.pid, flush=True)
print("end", flush=True)
if "context" in sys.argv:
    guard.release()
    sys.stdin.readline()
    with TreeGuard():
        if "stopped" in sys.argv:
            os.kill(child, 9)
            engine.kill()
            engine.wait()
    sys.exit(0)
if "release" in sys.argv:
    guard.release()
    sys.exit(0)
if "exit" in sys.argv:
    sys.exit(70)
time.sleep(300)
"""

Start = Callable[..., tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a worker; returns it and the ids of everything below it. Cleans up what a failing test leaves."""
    everything: list[int] = []
    workers: list[subprocess.Popen[str]] = []

    def starter(*flags: str, leads: bool = True) -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, "-c", WORKER, *flags]
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0 if leads else None
        )
        workers.append(worker)
        assert worker.stdout is not None
        pids = [int(line) for line in iter(worker.stdout.readline, "end\n")]
        everything.extend(pids)
        return worker, pids

    yield starter
    for pid in everything:
        if running(pid):
            os.kill(pid, signal.SIGKILL)
    for worker in workers:
        worker.kill()
        worker.wait()
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                stream.close()


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_worker_takes_its_engine_with_it(start: Start, number: signal.Signals) -> None:
    worker, pids = start()
    assert all(running(pid) for pid in pids)
    worker.send_signal(number)
    worker.wait()
    assert gone(pids)


def test_a_worker_that_led_no_group_takes_its_engine_with_it_too(start: Start) -> None:
    worker, pids = start(leads=False)
    worker.kill()
    worker.wait()
    assert gone(pids)


def test_a_forked_child_does_not_keep_the_guard_asleep(start: Start) -> None:
    worker, pids = start("fork")
    assert len(pids) == 3
    worker.kill()
    worker.wait()
    assert gone(pids)


def test_a_worker_that_ends_by_itself_keeps_its_exit_code_and_leaves_nothing(start: Start) -> None:
    worker, pids = start("exit")
    assert worker.wait() == 70
    assert gone(pids)


def test_without_the_guard_the_engine_would_live_on(start: Start) -> None:
    worker, pids = start("unguarded")
    worker.kill()
    worker.wait()
    assert not gone(pids, within_s=0.3)


def test_a_released_guard_kills_nothing(start: Start) -> None:
    worker, pids = start("release")
    assert worker.wait() == 0
    assert not gone(pids, within_s=0.3)


def test_left_in_good_order_the_group_is_spared(start: Start) -> None:
    worker, pids = start("context", "stopped")
    beside = subprocess.Popen(["sleep", "300"], process_group=worker.pid)  # like the second program of a pipeline
    worker.communicate("go\n")
    assert worker.returncode == 0
    assert gone(pids)
    assert not gone([beside.pid], within_s=0.2)
    beside.kill()
    beside.wait()


def test_left_with_something_running_nothing_is_spared(start: Start) -> None:
    worker, pids = start("context")
    worker.communicate("go\n")
    assert worker.returncode == 0
    assert gone(pids)


def test_a_process_tree_finds_and_ends_orphans(start: Start) -> None:
    tree = ProcessTree(os.getpid())
    worker, pids = start("unguarded")
    tree.remember()
    worker.kill()  # its children lose their parent: only a tree that was remembered still knows them
    worker.wait()
    assert set(tree.alive()) == set(pids)
    assert tree.kill() == len(pids)
    assert gone(pids)


def test_a_process_tree_leaves_alone_what_was_there_before(start: Start) -> None:
    _, pids = start("unguarded")
    tree = ProcessTree(os.getpid())
    assert tree.kill() == 0
    assert all(running(pid) for pid in pids)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal, sys, time
from headrace.workers.process_guard import set_parent_death_signal
set_parent_death_signal(signal.SIGKILL, parent=int(sys.argv[1]))
print("set", flush=True)
time.sleep(300)
''', sys.argv[1] if len(sys.argv) > 1 else str(__import__("os").getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, flush=True)
print(child.stdout.readline().strip(), flush=True)
import time
time.sleep(300)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux only")
def test_a_worker_dies_with_its_supervisor() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "set\n"
        parent.kill()
        parent.wait()
        assert gone([child])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux only")
def test_a_worker_whose_supervisor_died_before_it_asked_dies_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, "1"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "\n"
        assert gone([child])
        parent.kill()
