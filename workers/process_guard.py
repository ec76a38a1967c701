"""Ends all engine processes when their worker ends, however it ends.

Engines start processes of their own, and not all of those notice when the worker is killed. A worker therefore leads a process
group and starts a small shell that waits on a pipe: when the worker has ended, the pipe closes and the shell kills the group.
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
    """Kills this process's group as soon as this process has ended. Start it before the engine and keep it to the end.

    Leaving it as a context manager releases it, unless this process still has descendants.
    """

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def start(self) -> None:
        """Make this process the leader of its own process group, if it is not already, and start the guard."""
        _lead_group()
        # A file object would be closed while the interpreter shuts down, and the guard would then kill this process.
        reading, self._pipe = os.pipe()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "headrace-guard", str(os.getpgrp())],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Otherwise the shell would be in the group that it kills.
            cwd="/",
        )
        os.close(reading)
        # A forked child would hold the pipe open, and the guard would never wake.
        os.register_at_fork(after_in_child=self._close)

    def release(self) -> None:
        """End the guard without killing the group, after the engine has been stopped in an orderly way."""
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
        if all(pid == shell or _is_tracker(pid) for pid, _ in descendants(os.getpid())):
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
    # This process ran in the foreground group and has just left it. Take the terminal along, or Ctrl-C would not reach it.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(0, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, before)


def set_parent_death_signal(number: int = signal.SIGTERM, *, parent: int | None = None) -> bool:
    """Ask the kernel to send this process signal `number` when the thread that started it ends. Returns whether it was set.

    Linux only. `parent` is the process id of the expected parent: if it has ended already, the signal is sent at once.
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
    """The descendants of `root` with their start times, so that they can be ended even after losing their parent.

    Reads /proc. Without /proc the tree is empty, and only `TreeGuard` protects.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._before = set(descendants(root))
        self._members: set[tuple[int, int]] = set()

    def remember(self) -> None:
        """Add all current descendants of the root except those that existed when this object was created."""
        self._members |= {member for member in set(descendants(self._root)) - self._before if not _is_tracker(member[0])}

    def alive(self) -> list[int]:
        """Return the ids of the members that still run. Zombies do not count."""
        return [pid for pid, started in self._members if _stat(pid) == (started, True)]

    def kill(self) -> int:
        """Send SIGKILL to the members that still run and wait for their end. Returns their number. Blocks up to two seconds."""
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


def descendants(root: int) -> Iterator[tuple[int, int]]:
    """Yield (process id, start time) of each descendant of `root`."""
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
    """Return whether a process is Python's resource tracker, which still serves this process and ends with it."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _stat(pid: int) -> tuple[int, bool] | None:
    """Return (start time, whether it still runs) of a process, or None if there is none."""
    fields = _fields(pid)
    return (int(fields[19]), fields[0] not in "ZX") if fields else None


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the command name: 0 is the state, 1 the parent, 19 the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
