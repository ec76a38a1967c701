"""The death of vLLM's engine core: noticed by polling or by a failed call, declared once, with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from headrace.workers.errors import EngineDead, EngineOverloaded
from headrace.workers.vllm import convert

CORE_GONE = "vLLM's engine core is gone; its own log lines say why"
_POLL_S = 0.2  # how often an idle engine is looked at; a busy one reports its death by itself


class CoreDeath:
    """Keeps the reason of a core's death. `on_death` is called with it, once. Used on the event loop only."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self.reason: str | None = None
        self._on_death = on_death
        self._known = asyncio.Event()

    def declare(self, reason: str = CORE_GONE) -> None:
        """Note that the core is dead. Of several reasons the first one counts."""
        if self.reason is None:
            self.reason = reason
            self._known.set()
            self._on_death(reason)

    async def wait(self, has_died: Callable[[], bool]) -> str:
        """Return the reason once the core is dead. `has_died` is asked every 0.2 s."""
        while self.reason is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._known.wait()
            if has_died():
                self.declare()
        return self.reason

    def translate(self, error: BaseException) -> BaseException:
        """Return an exception of vLLM as one of ours; others are returned as they are. One that means death declares it."""
        from vllm.exceptions import GracefulHTTPError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            self.declare()
            return EngineDead(CORE_GONE)
        if isinstance(error, GracefulHTTPError):
            return EngineOverloaded(str(error))
        return convert.translate_invalid(error) or error
