"""Retries calls that must not be given up while the broker cannot be reached."""

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
    """Call `attempt` until it succeeds or `wanted()` is False. Each failure is logged as `event`, with `context`.

    Raises every exception of `attempt` except JetStreamError, which is retried after `retry_s`.
    """
    while wanted():
        try:
            await attempt()
        except JetStreamError as error:
            log.warning(event, **context, error=str(error))
            await asyncio.sleep(retry_s)
        else:
            return
