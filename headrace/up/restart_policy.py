"""Decides when a part of `headrace up` is restarted, without processes or clocks, so that every case is a unit test.

A part that ends by itself is started again after 0.5 s, then 1 s, 2 s … up to 30 s. In a deployment that was ready once, the
last one of its kind waits up to 2 s. 60 s of running forget the past. Two ends are no crash: a worker that leaves with code 0
was drained on purpose, and code 78 means that its settings are wrong, which another start cannot cure. Once the deployment was
ready they are not, and such an end counts as a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.base.errors import EXIT_CONFIGURATION, EXIT_OK
from headrace.up.process import Child


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits before a restart, in seconds."""

    first_s: float = 0.5
    factor: float = 2.0
    most_s: float = 30.0
    most_of_last_s: float = 2.0  # while no other part of the kind runs
    healthy_after_s: float = 60.0  # running this long forgets earlier crashes


@dataclass(frozen=True, slots=True)
class Restart:
    """Decision to start the part again in `after_s` seconds, after `crashes` in a row."""

    after_s: float
    crashes: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Decision not to start the part again. `fatal`: all of `up` must end, with `exit_code`."""

    reason: Literal["asked", "drained", "configuration"]
    fatal: bool = False
    exit_code: int = EXIT_OK


Decision = Restart | Leave


class RestartState:
    """History of the starts and crashes of a part. Times are seconds of any monotonic clock."""

    def __init__(self, *, essential: bool, backoff: Backoff | None = None) -> None:
        """Begin without a start. `essential`: `up` is of no use without the part, so even a clean exit is undone."""
        self._essential = essential
        self._backoff = backoff or Backoff()
        self._started_s = 0.0
        self._asked = False
        self.crashes = 0
        self.starts = 0

    def started(self, now_s: float) -> None:
        self._started_s = now_s
        self.starts += 1

    def stop_asked(self) -> None:
        """Note that the part is to stop: its end is no crash from now on."""
        self._asked = True

    def exited(self, now_s: float, *, exit_code: int, serving: bool, ready: bool = False, last: bool = False) -> Decision:
        """Decide what follows the end of the part.

        `exit_code` is negative for a signal; `serving`: `up` can answer requests without the part; `ready`: the deployment was
        ready once, with the settings that it still has. Then whatever the part says of them is a crash: something that it has
        read led it astray, and a deployment that serves must not end for that. `last`: no other part of its kind runs.
        """
        if self._asked:
            return Leave("asked")
        if exit_code == EXIT_CONFIGURATION and not ready:
            return Leave("configuration", fatal=self._essential or not serving, exit_code=EXIT_CONFIGURATION)
        if exit_code == EXIT_OK and not self._essential:
            return Leave("drained")
        if now_s - self._started_s >= self._backoff.healthy_after_s:
            self.crashes = 0
        self.crashes += 1
        # The exponent is capped: a part that crashed a thousand times must not overflow a float.
        wait_s = self._backoff.first_s * self._backoff.factor ** min(self.crashes - 1, 32)
        most_s = self._backoff.most_of_last_s if last and ready else self._backoff.most_s
        return Restart(min(wait_s, most_s), self.crashes)


@dataclass(slots=True, eq=False)
class ManagedProcess:
    """A process to keep running. `argv` is what `ps` shows after `headrace`; the rest travels in `env`."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    state: RestartState
    role: str = ""  # of a worker
    metrics_port: int | None = None
    python: str | None = None  # the interpreter; None = that of `headrace up`
    after: ManagedProcess | None = None  # it starts when this one can answer, or has failed to
    child: Child | None = None
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    ran: asyncio.Event = field(default_factory=asyncio.Event)  # its first process has ended
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def serves(self) -> bool:
        return self.role not in ("", "prefill", "encode")

    async def turn(self, answering: asyncio.Event, *, timeout_s: float) -> None:
        """Wait until the worker that this part starts after can answer or has ended, this part is to stop, or time is up."""
        if self.after is not None:
            await first_of(self.stop_asked, answering, self.after.ran, timeout_s=timeout_s)

    def describe(self) -> dict[str, Any]:
        """Return the part as the run file shows it."""
        role = {"role": self.role} if self.role else {}
        port = {"metrics_port": self.metrics_port} if self.metrics_port is not None else {}
        return {"name": self.name, **role, "pid": self.child.pid if self.child else None, **port}


async def first_of(*events: asyncio.Event, timeout_s: float | None) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in waiting:
            future.cancel()
