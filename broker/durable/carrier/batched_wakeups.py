"""Lets tasks go on together at most every few milliseconds, so that what they send next leaves in one write."""

from __future__ import annotations

import asyncio


class BatchedWakeups:
    """The turns of one carrier. One comes `gap_s` after the first task began to wait for it."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._next: asyncio.Event | None = None

    async def next(self) -> None:
        """Wait for the next turn, at most `gap_s`."""
        if self._next is None:
            self._next = asyncio.Event()
            asyncio.get_running_loop().call_later(self._gap_s, self._begin)
        await self._next.wait()

    def _begin(self) -> None:
        turn, self._next = self._next, None
        if turn is not None:
            turn.set()
