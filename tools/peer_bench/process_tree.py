"""Runs processes for the length of a comparison, and says what they and all their descendants have used."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.tools.serve_bench.processes import usage

STOP_S = 20.0


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path) -> Iterator[int]:
    """Run a process in a session of its own, which is ended as a whole. Yields its id. Raises OSError."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _kill_session(process.pid)
        process.wait()


def _kill_session(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def tree(roots: Sequence[int]) -> set[int]:
    """Return these processes and their descendants, of those that run now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(") ", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid for pid in roots if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def used_s(pids: set[int]) -> float:
    """Return the CPU seconds of those that still run."""
    spent = 0.0
    for pid in pids:
        try:
            spent += usage(pid).cpu_s
        except FileNotFoundError:
            continue
    return spent


def rss_mib(pids: set[int]) -> float:
    """Return the resident memory of those that still run."""
    found = 0.0
    for pid in pids:
        try:
            found += usage(pid).rss / 2**20
        except FileNotFoundError:
            continue
    return found


def wait_until(ready: Callable[[], bool], timeout_s: float, roots: Sequence[int]) -> bool:
    """Ask `ready()` until it is true. Returns False when the time is over or one of the processes has ended."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if ready():
            return True
        if not all(_runs(pid) for pid in roots):
            return False
        time.sleep(0.2)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
