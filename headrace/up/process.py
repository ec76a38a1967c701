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
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from headrace.up.part_output import PartOutput
from headrace.workers.process_guard import set_parent_death_signal

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

    async def stop(self, *, grace_s: float) -> None:
        """Send SIGTERM, and after `grace_s` SIGKILL to the group if it is still there. Another task must be in `wait`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

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
