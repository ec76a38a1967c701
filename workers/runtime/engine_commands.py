"""Sends commands to the engine, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from headrace.workers.errors import EngineDead, WorkerError

log = structlog.get_logger()

Command = Callable[[], Awaitable[None]]


class EngineCommands:
    """A queue of submissions and aborts, so that an abort never overtakes its submission. Bounded by the slots."""

    def __init__(self, dead: Callable[[str], None]) -> None:
        """`dead` is called with the reason when the engine is dead."""
        self._queue: asyncio.Queue[Command] = asyncio.Queue()
        self._dead = dead

    def put(self, command: Command) -> None:
        """Queue a command. Its errors are only logged, except for the engine's death."""
        self._queue.put_nowait(command)

    async def run(self) -> None:
        """Run the queued commands until cancelled."""
        while True:
            command = await self._queue.get()
            try:
                await command()
            except EngineDead as error:
                self._dead(str(error))
            except WorkerError as error:
                log.warning("engine.command_failed", error=str(error))
