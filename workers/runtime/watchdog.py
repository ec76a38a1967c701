"""Detects a dead engine: it reports its own death, or it has work and reports nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from headrace.workers import metrics


class DeathReporter(Protocol):
    """The method of `headrace.workers.engine.Engine` that the watchdog needs."""

    async def died(self) -> str: ...


class Watchdog:
    """Watches an engine. `dead` resolves with the reason as soon as the engine is dead."""

    def __init__(self, engine: DeathReporter, *, stall_s: float, running: Callable[[], int]) -> None:
        """Count the engine as dead when it has work, `running()` sequences, and reports nothing for `stall_s` seconds."""
        self._engine = engine
        self._stall_s = stall_s
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._last_step_s = 0.0
        self._reported_s = self._loop.time()
        self._suspended = False
        self.dead: asyncio.Future[str] = self._loop.create_future()

    def suspend(self) -> None:
        """Expect no reports: the engine stands still by an operator's will."""
        self._suspended = True

    def resume(self) -> None:
        """Expect reports again."""
        self._suspended = False
        self._last_step_s = self._reported_s = self._loop.time()

    @property
    def suspended(self) -> bool:
        """No reports are expected."""
        return self._suspended

    def report(self) -> dict[str, float]:
        """Return how long ago the engine has reported, and after how long it would count as dead, in seconds."""
        return {"last_report_s": round(self._loop.time() - self._reported_s, 3), "stall_limit_s": self._stall_s}

    def declare_dead(self, why: str) -> None:
        """Record that the engine is dead. Only the first reason counts."""
        if not self.dead.done():
            self.dead.set_result(why)

    def stepped(self) -> float:
        """Record a report of the engine, which proves that it lives. Returns the time by the loop's clock."""
        now = self._last_step_s = self._reported_s = self._loop.time()
        return now

    def begin(self) -> None:
        """Start the time limit for the next step: the engine had no work and now has some."""
        self._last_step_s = self._loop.time()

    @property
    def idle_s(self) -> float:
        """Return the seconds since the last report of an engine without work, or 0 for an engine with work."""
        return 0.0 if self._running() else self._loop.time() - self._reported_s

    async def watch_death(self) -> None:
        """Wait until the engine reports its own death."""
        self.declare_dead(await self._engine.died())

    async def watch_stall(self) -> None:
        """Declare an engine dead that has work and reports nothing for too long."""
        while True:
            await asyncio.sleep(min(1.0, self._stall_s / 4))
            running = self._running()
            now = self._loop.time()
            if not running or self._suspended:
                self._last_step_s = now
            elif now - self._last_step_s > self._stall_s:
                metrics.STALLS.inc()
                self.declare_dead(f"no step for {self._stall_s:g} s with {running} sequences running")
                return
