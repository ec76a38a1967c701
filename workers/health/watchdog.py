"""When the engine is dead: it says so, or it has work and says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from headrace.workers import metrics


class Mortal(Protocol):
    """The one method of `headrace.workers.engine.Engine` that is needed here."""

    async def died(self) -> str: ...


class Watchdog:
    """`dead` has the reason as soon as the engine is gone."""

    def __init__(self, engine: Mortal, *, stall_s: float, running: Callable[[], int], look: Callable[[float], None]) -> None:
        """The engine is dead when it works on something, `running()` sequences, and reports nothing for `stall_s`.

        `look(now_s)` is called about once a second while it lives.
        """
        self._engine = engine
        self._stall_s = stall_s
        self._running = running
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._last_step_s = 0.0
        self._heard_s = self._loop.time()
        self.dead: asyncio.Future[str] = self._loop.create_future()

    def declare_dead(self, why: str) -> None:
        """The engine is gone. Only the first reason counts."""
        if not self.dead.done():
            self.dead.set_result(why)

    def stepped(self) -> float:
        """The engine has shown that it lives. Returns the time by the loop's clock."""
        now = self._last_step_s = self._heard_s = self._loop.time()
        return now

    def begin(self) -> None:
        """It had nothing to do and now has: the time for its next step begins."""
        self._last_step_s = self._loop.time()

    @property
    def idle_s(self) -> float:
        """How long nothing has come from the engine while it had nothing to do; 0 when it has."""
        return 0.0 if self._running() else self._loop.time() - self._heard_s

    async def watch_death(self) -> None:
        """Until it says that it is gone."""
        self.declare_dead(await self._engine.died())

    async def watch_stall(self) -> None:
        """An engine that has work and says nothing is as dead as one that has exited."""
        while True:
            await asyncio.sleep(min(1.0, self._stall_s / 4))
            running = self._running()
            now = self._loop.time()
            if not running:
                self._last_step_s = now
            elif now - self._last_step_s > self._stall_s:
                metrics.STALLS.inc()
                self.declare_dead(f"no step for {self._stall_s:g} s with {running} sequences running")
                return
            self._look(now)
