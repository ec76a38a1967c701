"""Runs the child processes of `headrace up`: each in its own process group, its output read line by line, never left behind.

A part is started as `python -P -m headrace <command> …`, so that `ps` shows `headrace worker` or `headrace frontend`.  `-P`
keeps the current directory out of the import path, where a folder could shadow a package.
Secrets travel in the environment, never in the arguments.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from headrace.base.process import REFUSE
from headrace.workers.process_guard import set_parent_death_signal

# Reads the output of a part of `headrace up`: the lines of one read together, without a task that each of them wakes.

LONGEST_LINE = 1 << 20  # bytes; a longer line is dropped
TAIL_LINES = 20


class Lines:
    """Cuts bytes into lines. Empty ones are left out; of a progress bar the last state is kept."""

    def __init__(self, *, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = b""  # a line that has not ended
        self._too_long = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end in these bytes."""
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(self._rest + data)
            return []
        whole, rest = self._rest + data[:end], data[end + 1 :]
        if self._too_long:
            whole = whole.partition(b"\n")[2]
            self._too_long = False
        self._keep(rest)
        return _texts(whole)

    def end(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return _texts(rest)

    def _keep(self, rest: bytes) -> None:
        self._too_long = self._too_long or len(rest) > self._longest
        self._rest = b"" if self._too_long else rest


def _texts(whole: bytes) -> list[str]:
    text = whole.decode(errors="replace")
    lines = [line.rstrip() for line in text.split("\n")]
    if "\r" in text:
        lines = [line.rpartition("\r")[2] for line in lines]
    return [line for line in lines if line]


class PartOutput(asyncio.Protocol):
    """The reading end of a part's pipe. The lines of a read go to `on_lines`; the last ones are kept in `tail`."""

    def __init__(self, on_lines: Callable[[Sequence[str]], None]) -> None:
        """Make it in a running event loop."""
        self._lines = Lines()
        self._on_lines = on_lines
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._take(self._lines.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._take(self._lines.end())
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _take(self, lines: list[str]) -> None:
        if lines:
            self.tail.extend(lines[-TAIL_LINES:])
            self._on_lines(lines)


SUPERVISOR_PID = "HEADRACE_SUPERVISOR_PID"

_LAST_OUTPUT_S = 1.0  # to read what a process wrote before it ended


def headrace_command(*arguments: str, python: str | None = None) -> list[str]:
    """Return the command line that runs `headrace <arguments>` with this interpreter, or with another one."""
    return [python or sys.executable, "-P", "-m", "headrace", *arguments]


def end_with_supervisor() -> None:
    """Have the kernel kill this process, a part, when `headrace up` dies, however it dies."""
    supervisor = os.environ.pop(SUPERVISOR_PID, None)
    if supervisor is not None:
        set_parent_death_signal(signal.SIGKILL, parent=int(supervisor))


def kill_group(pid: int, sig: int = signal.SIGKILL) -> None:
    """Signal the process group that `pid` leads. Does nothing when it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)


def end_now(code: int) -> NoReturn:
    """End this process after its exit handlers, but do not take the interpreter down.

    Libraries of an engine do not all survive that: triton prints a page of leaks, and native threads may crash.
    """
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class Child:
    """A running child. The lines of its output go to `on_lines`; the last lines are kept for error messages."""

    def __init__(self, process: asyncio.subprocess.Process, output: PartOutput) -> None:
        self._process = process
        self._output = output
        self.tail = output.tail

    @classmethod
    async def start(cls, command: Sequence[str], *, env: Mapping[str, str], on_lines: Callable[[Sequence[str]], None]) -> Child:
        # Our own pipe instead of asyncio's: some Python versions end `Process.wait` only when the pipe is closed, and a
        # grandchild (an engine process) may hold it open longer than its parent lives.
        read_fd, write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env={**env, SUPERVISOR_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                process_group=0,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        output = PartOutput(on_lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(read_fd, "rb", 0))
        return cls(process, output)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Read the output until the process has ended, then kill the rest of its group.

        Returns the exit code, negative for a signal.
        """
        try:
            try:
                code = await self._process.wait()
            finally:
                kill_group(self.pid)
            await asyncio.wait({self._output.ended}, timeout=_LAST_OUTPUT_S)
        finally:
            self._output.close()
        return code

    async def stop(self, *, grace_s: float, margin_s: float = 0.0) -> None:
        """Send SIGTERM, and after `grace_s` SIGKILL to the group if it is still there. Another task must be in `wait`.

        `margin_s` before that it gets a second SIGTERM, with which a part ends its own grace period.
        """
        for wait_s in (grace_s - margin_s, margin_s) if margin_s else (grace_s,):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._process.wait()
                    return
        self.kill()
        await self._process.wait()

    def refuse_requests(self) -> None:
        """Have a frontend answer new requests with 503, while it goes on with the others."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(REFUSE)

    def kill(self) -> None:
        kill_group(self.pid)


def last_words(tail: Sequence[str]) -> str:
    """Return why a part ended, from its last lines: its own error message if there is one, else the last line."""
    for line in reversed(tail):
        if line.startswith("headrace ") and ": " in line:
            return line.partition(": ")[2]
        if line.startswith("{"):
            with contextlib.suppress(ValueError, AttributeError):
                if error := json.loads(line).get("error"):
                    return str(error)
    return tail[-1] if tail else "it said nothing"
