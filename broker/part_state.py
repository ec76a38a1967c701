"""The state of a worker's or router's process as an orchestrator asks for it: does it live, is it ready, is it healthy.

The event loop publishes a standing every half second, and questions are answered with the last one, from another thread.  So
answers come while the loop is busy, cost it nothing, and its silence itself is an answer: a loop that has published nothing for
`SILENCE_S` hangs, and the process has to be started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

EVERY_S = 0.5
SILENCE_S = 30.0


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The standing of a part. `why`: the reason for which it is not ready. `facts` are those of its role."""

    ready: bool
    healthy: bool
    why: str = ""
    facts: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True):
    """An answer to an orchestrator: whether it is a good one, and the body."""

    ok: bool
    body: dict[str, Any]


class PartState:
    def __init__(self, component: str, *, silence_s: float = SILENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._component = component
        self._silence_s = silence_s
        self._clock = clock
        self._began_s = clock()
        self._standing = Standing(ready=False, healthy=False, why="starting")
        self._published_s: float | None = None  # None until the first standing: a start may take minutes

    def publish(self, standing: Standing) -> None:
        """Replace the standing. To be called on the event loop."""
        self._standing = standing
        self._published_s = self._clock()

    def starts(self, why: str) -> None:
        """Report the phase of the start, until the first standing."""
        if self._published_s is None:
            self._standing = Standing(ready=False, healthy=False, why=why)

    async def keep(self, describe: Callable[[], Standing], *, every_s: float = EVERY_S) -> None:
        """Publish what `describe` returns until cancelled; then the part stops."""
        try:
            while True:
                self.publish(describe())
                await asyncio.sleep(every_s)
        finally:
            self._standing = Standing(ready=False, healthy=True, why="stopping", facts=self._standing.facts)
            self._published_s = None

    def live(self) -> Answer:
        silent_s = 0.0 if self._published_s is None else self._clock() - self._published_s
        if silent_s > self._silence_s:
            return Answer(False, {"status": "hangs", "reason": f"the event loop has done nothing for {silent_s:.0f} s"})
        return Answer(True, {"status": "alive"})

    def ready(self) -> Answer:
        alive, standing = self.live(), self._standing
        ready = alive.ok and standing.ready
        reason = None if ready else standing.why if alive.ok else alive.body["reason"]
        return Answer(ready, {"status": "ready" if ready else "not ready", "reason": reason})

    def health(self) -> Answer:
        """Answer whether the part is healthy, with all its facts."""
        alive, standing = self.live(), self._standing
        healthy = alive.ok and standing.healthy
        reason = (standing.why or None) if alive.ok else alive.body["reason"]
        body = {
            "status": "healthy" if healthy else "unhealthy",
            "reason": reason,
            "component": self._component,
            "up_s": round(self._clock() - self._began_s, 1),
            **standing.facts,
        }
        return Answer(healthy, body)
