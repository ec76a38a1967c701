"""The sleep mode of an engine: it frees its memory, or only pretends to, and refuses sequences meanwhile.

Level 1 is for pauses, level 2 for changing the weights.  The content of the cache after waking:

    memory freed?   level 1                         level 2
    yes             the tiers below the device      nothing
    no              everything                      nothing
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec

from headrace.workers.engine import Output
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.step_driver import StepDriver

LEVELS = (1, 2)
_POLL_S = 0.005


class SleepArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `sleep`. `mode`: "abort" the sequences inside, or "wait" for them to end, `timeout_s` at most."""

    level: Literal[1, 2] = 1
    mode: Literal["abort", "wait"] = "abort"
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0


class Sleeper:
    """Puts one engine to sleep and wakes it."""

    def __init__(self, scheduler: SimScheduler, driver: StepDriver) -> None:
        self._scheduler = scheduler
        self._driver = driver
        self._call = 0  # a later call supersedes a waiting one
        self.level = 0

    async def sleep(self, args: SleepArgs) -> dict[str, int | bool]:
        """Refuse sequences from now on, and sleep once those inside have ended or been aborted, with finish "abort"."""
        scheduler = self._scheduler
        self._call += 1
        call = self._call
        scheduler.closed = f"the engine sleeps (level {max(self.level, args.level)})"
        if args.mode == "wait":
            await self._until_idle(args.timeout_s, call)
            if call != self._call:  # woken, or sent to sleep otherwise, meanwhile
                return {"level": self.level, "aborted": 0, "memory_freed": scheduler.memory_freed}
        ids = scheduler.ids
        self._driver.abort(ids)
        if scheduler.exchange.prefill_side is not None:
            scheduler.exchange.prefill_side.release_all()
        if ids:
            self._driver.emit([Output(name, [], finish="abort") for name in ids])
        self.level = max(self.level, args.level)
        scheduler.memory_freed = scheduler.settings.sleep_frees_memory
        if self.level == max(LEVELS):
            scheduler.manager.clear()
        elif scheduler.memory_freed:
            scheduler.manager.clear_device()
        self._driver.wake()
        return {"level": self.level, "aborted": len(ids), "memory_freed": scheduler.memory_freed}

    async def _until_idle(self, timeout_s: float, call: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._driver.idle and call == self._call and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)

    def wake(self) -> None:
        """Accept sequences again. Has no effect on an engine that is awake."""
        self._call += 1
        self.level = 0
        self._scheduler.closed = ""
        self._scheduler.memory_freed = False
        self._driver.wake()


def sleep_args(given: object) -> SleepArgs:
    """Read the arguments of `sleep`. Raises RequestInvalid."""
    try:
        return msgspec.convert(given, SleepArgs)
    except msgspec.ValidationError as error:
        raise RequestInvalid(f"sleep: {error}") from None
