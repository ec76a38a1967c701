"""No engine process outlives its worker.

Engines start processes of their own, and not all of those notice when the worker is killed.  A worker therefore leads a
process group and starts a tiny shell that waits on a pipe: when the worker is gone, however it went, the pipe closes and the
shell kills the group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

_SCRIPT = 'read -r word; [ "$word" = leave ] || kill -9 "-$1"'
_PR_SET_PDEATHSIG = 1
_KILL_WAIT_S = 2.0


class TreeGuard:
    """Kills this process's group as soon as this process is gone. Start it before the engine, keep it to the end.

    As a context manager it is released at the end, unless something still runs below this process.
    """

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def start(self) -> None:
        """Become leader of a process group of our own, if not already, and start the guard."""
        _lead_group()
        # A bare descriptor: a file object would be closed while the interpreter winds down, and we would be killed doing so.
        reading, self._pipe = os.pipe()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "headrace-guard", str(os.getpgrp())],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # or it would be in the group it kills
            cwd="/",
        )
        os.close(reading)
        os.register_at_fork(
            after_in_child=self._close
        )  # a forked child would hold the pipe open and the guard would never wake

    def release(self) -> None:
        """Let the guard go without killing: the engine has been stopped in an orderly way."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        with suppress(OSError):
            os.write(self._pipe, b"leave\n")
        self._close()
        shell.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        shell = self._shell.pid if self._shell else -1
        if all(pid == shell or _is_tracker(pid) for pid, _ in _descendants(os.getpid())):
            self.release()

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _lead_group() -> None:
    if os.getpgrp() == os.getpid():
        return
    former = os.getpgrp()
    os.setpgid(0, 0)
    try:
        if os.tcgetpgrp(0) != former:
            return
    except OSError:  # no terminal
        return
    # We ran in the foreground and have just left that group: take the terminal along, or Ctrl-C would not reach us.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(0, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, before)


def set_parent_death_signal(number: int = signal.SIGTERM, *, parent: int | None = None) -> bool:
    """Ask the kernel to send us `number` when the thread that started us ends. Linux only; returns whether it was set.

    `parent` is the process id of the expected parent: if that is gone already, the signal is sent at once.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        return False
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
    return True


class ProcessTree:
    """The processes below `root`, remembered with their start times, so that they can be ended even after losing their parent.

    Reads /proc; where there is none the tree is empty and only the group guard protects.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._before = set(_descendants(root))
        self._members: set[tuple[int, int]] = set()

    def remember(self) -> None:
        """Take in everything below the root that was not there when this object was made."""
        self._members |= {member for member in set(_descendants(self._root)) - self._before if not _is_tracker(member[0])}

    def alive(self) -> list[int]:
        """Ids of the members that still run; a zombie does not."""
        return [pid for pid, started in self._members if _stat(pid) == (started, True)]

    def kill(self) -> int:
        """Kill what is left with SIGKILL and wait for it to be gone. Returns how many there were. Blocks up to two seconds."""
        self.remember()
        left = self.alive()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        until = time.monotonic() + _KILL_WAIT_S
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)
        return len(left)


def _descendants(root: int) -> Iterator[tuple[int, int]]:
    """(process id, start time) of everything below `root`."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if fields:
            children.setdefault(int(fields[1]), []).append((int(entry.name), int(fields[19])))
    pending = [root]
    while pending:
        for member in children.get(pending.pop(), ()):
            pending.append(member[0])
            yield member


def _is_tracker(pid: int) -> bool:
    """Whether it is Python's own resource tracker: that belongs to this process, serves it still, and ends with it."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _stat(pid: int) -> tuple[int, bool] | None:
    """(start time, whether it still runs) of a process; None if there is none."""
    fields = _fields(pid)
    return (int(fields[19]), fields[0] not in "ZX") if fields else None


def _fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the command name: state, parent, … start time is number 19."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
