"""Detects a dead engine: it reports its own death, or it has work and reports nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace.workers import metrics
from headrace.workers.engine import Engine

# Decides after how long an engine that has work and reports nothing counts as dead, by the steps that it has made before.
#
# An engine that makes a step in 20 ms is dead long before the two minutes that one may need that computes long prompts on a
# CPU.

FACTOR = 20.0  # of the longest step lately
LEAST_S = 30.0  # what an engine may do between two steps without a word: compile a kernel, or a grammar
SURE_FACTOR = 3.0  # a step as long as the longest one, and twice that on top, is never held against the engine
WINDOW_S = 300.0  # steps are remembered for one to two of these


class StallLimit:
    """The limit of one engine: `setting_s` until a step was seen, and again when none was for long.

    With steps seen it is 20 times the longest of them, at least 30 s and at most the setting, but never below 3 times that
    step.
    """

    def __init__(self, setting_s: float) -> None:
        self._setting_s = setting_s
        self.longest_s = self._before_s = 0.0  # of this window and of the one before
        self._window_ends_s: float | None = None

    def step(self, took_s: float) -> None:
        """Take note of a step. The caller may leave out one that is not above `longest_s`."""
        if took_s > self.longest_s:
            self.longest_s = took_s

    def roll(self, now_s: float) -> None:
        """Forget old steps. To be called every second or so."""
        if self._window_ends_s is None:
            self._window_ends_s = now_s + WINDOW_S
        elif now_s >= self._window_ends_s:
            over_s = now_s - self._window_ends_s
            self._before_s = self.longest_s if over_s < WINDOW_S else 0.0
            self.longest_s = 0.0
            self._window_ends_s = now_s + WINDOW_S

    @property
    def limit_s(self) -> float:
        """Return the limit in seconds."""
        longest_s = max(self.longest_s, self._before_s)
        if not longest_s:
            return self._setting_s
        followed_s = min(max(FACTOR * longest_s, LEAST_S), self._setting_s)
        return max(followed_s, SURE_FACTOR * longest_s)


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Tells what an engine has to do: its running sequences, and whether one of them waits for another worker."""

    running: Callable[[], int]
    waiting: Callable[[], bool]


class Watchdog:
    """Watches an engine. `dead` resolves with the reason as soon as the engine is dead."""

    def __init__(self, engine: Engine, work: EngineWork, *, stall_s: float) -> None:
        """Count the engine as dead when it has running sequences and reports nothing for too long.

        How long that is follows the steps that were seen (`StallLimit`). It is `stall_s` until one was, and while a sequence
        waits for another worker, which may take its time.
        """
        self._engine = engine
        self._stall_s = stall_s
        self._stall = StallLimit(stall_s)
        self._check_every_s = min(1.0, stall_s / 4)
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._last_step_s = 0.0
        self._reported_s = self._loop.time()
        self._suspended = 0
        self.dead: asyncio.Future[str] = self._loop.create_future()

    def suspend(self) -> None:
        """Expect no reports: the engine stands still by an operator's will. Ended by as many calls of `resume`."""
        self._suspended += 1

    def resume(self) -> None:
        self._suspended = max(0, self._suspended - 1)
        self._last_step_s = self._reported_s = self._loop.time()

    @property
    def suspended(self) -> bool:
        return self._suspended > 0

    def report(self) -> dict[str, float]:
        """Return how long ago the engine has reported, and after how long it would count as dead, in seconds."""
        return {"last_report_s": round(self._loop.time() - self._reported_s, 3), "stall_limit_s": round(self._stall.limit_s, 3)}

    def declare_dead(self, why: str) -> None:
        """Record that the engine is dead. Only the first reason counts."""
        if not self.dead.done():
            self.dead.set_result(why)

    def stepped(self) -> float:
        """Record a report of the engine, which proves that it lives. Returns the time by the loop's clock."""
        now = self._loop.time()
        if self._last_step_s and now - self._last_step_s > self._stall.longest_s:
            self._stall.step(now - self._last_step_s)
        self._last_step_s = self._reported_s = now
        return now

    def begin(self) -> None:
        """Start the time limit for the next step: the engine had no work and now has some."""
        self._last_step_s = self._loop.time()

    @property
    def idle_s(self) -> float:
        """Return the seconds since the last report of an engine without work, or 0 for an engine with work."""
        return 0.0 if self._work.running() else self._loop.time() - self._reported_s

    async def watch_death(self) -> None:
        """Wait until the engine reports its own death."""
        self.declare_dead(await self._engine.died())

    async def watch_stall(self) -> None:
        """Declare an engine dead that has work and reports nothing for too long."""
        while True:
            await asyncio.sleep(self._check_every_s)
            running = self._work.running()
            now = self._loop.time()
            self._stall.roll(now)
            limit_s = self._stall.limit_s
            metrics.STALL_LIMIT_S.set(limit_s)
            if not running or self._suspended:
                self._last_step_s = now
            elif now - self._last_step_s > (max(limit_s, self._stall_s) if self._work.waiting() else limit_s):
                metrics.STALLS.inc()
                self.declare_dead(f"no step for {limit_s:g} s with {running} sequences running")
                return
