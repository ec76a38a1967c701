"""Trying again while the broker cannot be reached, where giving up is not an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from headrace.jetstream.errors import JetStreamError

log = structlog.get_logger()


async def until_done(
    attempt: Callable[[], Awaitable[object]],
    *,
    event: str,
    retry_s: float,
    wanted: Callable[[], bool] = lambda: True,
    **context: str,
) -> None:
    """Until `attempt` goes through or is not `wanted` any more. Each failure is logged as `event`, with `context`.

    Raises whatever `attempt` raises but for a JetStreamError.
    """
    while wanted():
        try:
            await attempt()
        except JetStreamError as error:
            log.warning(event, **context, error=str(error))
            await asyncio.sleep(retry_s)
        else:
            return
