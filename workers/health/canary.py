"""Sends a canary request to an idle engine, because a dead engine may still accept requests.

If its answer does not come in time, the engine counts as dead before a client's request fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.workers import metrics
from headrace.workers.errors import EngineDead, WorkerError
from headrace.workers.health.probe import EngineProbe
from headrace.workers.runtime.runtime import Runtime

log = structlog.get_logger()


class Canary:
    """Sends canaries to an idle engine while the runtime runs."""

    def __init__(
        self, probe: EngineProbe, runtime: Runtime, *, idle_s: float, timeout_s: float, serving: Callable[[], bool]
    ) -> None:
        """Send a canary after `idle_s` without a step, 0 = never. `serving` returns whether the worker accepts requests."""
        self._probe = probe
        self._runtime = runtime
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._serving = serving

    async def run(self) -> None:
        """Send canaries until cancelled, or until the engine does not answer and is declared dead."""
        while self._idle_s and not self._runtime.dead.done():
            rest_s = self._idle_s - self._runtime.watchdog.idle_s
            if rest_s > 0 or not self._serving():
                await asyncio.sleep(max(rest_s, min(1.0, self._idle_s / 4)))
                continue
            async with self._runtime.exclusive:
                if self._serving():  # or it was sent to sleep while this waited
                    await self._send()

    async def _send(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                took_s = await self._probe.ask()
        except TimeoutError:
            metrics.CANARIES.labels("silent").inc()
            self._runtime.watchdog.declare_dead(
                f"a request of one token was not answered within {self._timeout_s:g} s after idling"
            )
        except EngineDead as error:
            metrics.CANARIES.labels("dead").inc()
            self._runtime.watchdog.declare_dead(str(error))
        except WorkerError as error:  # A refusal is an answer, too.
            metrics.CANARIES.labels("refused").inc()
            log.warning("canary.refused", error=str(error))
            self._runtime.watchdog.stepped()
        else:
            metrics.CANARIES.labels("answered").inc()
            log.debug("canary.answered", took_s=round(took_s, 3))
