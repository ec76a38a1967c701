"""Measures the lag of the event loop. Work that blocks the loop blocks every stream, so look at this figure first."""

from __future__ import annotations

import asyncio

import structlog

from headrace.frontend.histogram import Series

log = structlog.get_logger()

PERIOD_S = 0.05
WARN_S = 0.5
WARN_EVERY_S = 10.0


async def watch_lag(series: Series, *, period_s: float = PERIOD_S) -> None:
    """Observe how much later than requested a sleep ends, again and again, until cancelled."""
    loop = asyncio.get_running_loop()
    silent_until = 0.0
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        late = max(0.0, loop.time() - due)
        series.observe(late)
        if late > WARN_S and due > silent_until:
            silent_until = due + WARN_EVERY_S
            log.warning("loop.blocked", seconds=round(late, 3))
