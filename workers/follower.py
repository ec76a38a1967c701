"""Runs the worker of a node that computes a part of an engine of several nodes, which the worker of its first node serves.

It is registered nowhere and takes no requests. It serves the metrics of its part, and ends when its part does: the parts of an
engine start and end together, and whatever started it starts it again for the next one.
"""

from __future__ import annotations

import asyncio
import signal

import structlog

from headrace.workers.engine import Engine, EngineInfo
from headrace.workers.errors import EngineDead

log = structlog.get_logger()


async def follow(engine: Engine, info: EngineInfo) -> None:
    """Wait until a stop signal comes. Raises EngineDead when the engine ends before that."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    stopping, dying = asyncio.create_task(stop.wait()), asyncio.create_task(engine.died())
    log.info("worker.follows", engine=info.engine, meaning="requests go to the first node of this engine")
    try:
        await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            raise EngineDead(dying.result())
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        for task in (stopping, dying):
            task.cancel()
