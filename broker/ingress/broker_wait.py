"""Holds new requests while the broker, or the lease of their ingress, is away for a moment. Nothing of them is stored yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.broker import metrics

log = structlog.get_logger()

MOST = 1000  # requests that are held at once; more are refused, as all were without this


class BrokerWait:
    """Holds the new requests of one ingress until the broker can be used again, or their time is over."""

    def __init__(self, away: Callable[[], bool], *, longest_s: float) -> None:
        """`away` tells whether the broker is away and may be back soon. `longest_s`: 0 holds no request."""
        self._away = away
        self._longest_s = longest_s
        self._changed = asyncio.Event()
        self._held = 0

    def back(self) -> None:
        """Look again whether the broker can be used. To be called after a reconnection, and when the lease is held again."""
        self._changed.set()

    async def hold(self, longest_s: float) -> None:
        """Wait while the broker is away, at most `longest_s`. Whether it is back says `away`."""
        longest_s = min(longest_s, self._longest_s)
        if longest_s <= 0 or not self._away():
            return
        if self._held >= MOST:
            metrics.BROKER_AWAITED.labels("too_many").inc()
            return
        if not self._held:
            log.info("broker.awaited", longest_s=self._longest_s)
        self._held += 1
        metrics.AWAITING_BROKER.set(self._held)
        outcome = "away"
        try:
            async with asyncio.timeout(longest_s):
                while self._away():
                    self._changed.clear()
                    await self._changed.wait()
            outcome = "back"
        except TimeoutError:
            pass
        finally:
            self._held -= 1
            metrics.AWAITING_BROKER.set(self._held)
            metrics.BROKER_AWAITED.labels(outcome).inc()
