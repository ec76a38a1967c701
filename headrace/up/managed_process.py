"""Holds a process that `headrace up` keeps running: its command line, its environment, and the state of its restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.up.process import Child
from headrace.up.restart_policy import RestartState


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
        """Return True for a worker that answers requests."""
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
    """Wait until one of the events is set, or the timeout."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in waiting:
            future.cancel()
