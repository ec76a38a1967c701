"""What the engine is told, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from headrace.workers.errors import EngineDead, WorkerError

log = structlog.get_logger()

Command = Callable[[], Awaitable[None]]


class EngineCommands:
    """Submissions and aborts in one queue, so that an abort never overtakes its submission. Bounded by the slots."""

    def __init__(self, dead: Callable[[str], None]) -> None:
        """`dead(why)`: the engine is gone."""
        self._queue: asyncio.Queue[Command] = asyncio.Queue()
        self._dead = dead

    def put(self, command: Command) -> None:
        """Its turn comes; what fails of it, but for the engine's death, is only logged."""
        self._queue.put_nowait(command)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            command = await self._queue.get()
            try:
                await command()
            except EngineDead as error:
                self._dead(str(error))
            except WorkerError as error:
                log.warning("engine.command_failed", error=str(error))
