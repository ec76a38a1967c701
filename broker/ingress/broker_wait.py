"""Holds new requests while the broker, the lease of their ingress or the leader of their stream is away for a moment.

None of them is known to be stored yet.
"""

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
        self.longest_s = longest_s
        self._away = away
        self._changed = asyncio.Event()
        self._held = 0

    def back(self) -> None:
        """Look again whether the broker can be used. To be called after a reconnection, and when the lease is held again."""
        self._changed.set()

    def enter(self, why: str) -> bool:
        """Begin to hold a request, which is to `leave` then. False: so many are held that it is to be refused."""
        if self._held >= MOST:
            metrics.BROKER_AWAITED.labels("too_many").inc()
            return False
        if not self._held:
            log.info("broker.awaited", longest_s=self.longest_s, why=why)
        self._held += 1
        metrics.AWAITING_BROKER.set(self._held)
        return True

    def leave(self, outcome: str) -> None:
        """End holding a request: `back`, or `away` where it was given up."""
        self._held -= 1
        metrics.AWAITING_BROKER.set(self._held)
        metrics.BROKER_AWAITED.labels(outcome).inc()

    async def hold(self, longest_s: float) -> None:
        """Wait while the broker is away, at most `longest_s`. Whether it is back says `away`."""
        longest_s = min(longest_s, self.longest_s)
        if longest_s <= 0 or not self._away():
            return
        if not self.enter("not connected, or the lease is not held"):
            return
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
            self.leave(outcome)
