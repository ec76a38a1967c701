"""Keeps the results of context-only requests while their blocks are on offer, because only by them can these be given up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


class HeldPrefills:
    """Results by sequence id, each for the engine's own time limit. Used on the event loop only."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, sequence_id: str, result: Any, lease_s: float) -> None:
        timer = asyncio.get_running_loop().call_later(lease_s, self._held.pop, sequence_id, None)
        self._held[sequence_id] = (result, timer)

    def release(self, sequence_id: str) -> None:
        """Cancel a request whose blocks are on offer. Does nothing for an unknown one."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            held[1].cancel()
            with suppress(Exception):  # fetched meanwhile, or the engine is dying
                held[0].abort()

    def clear(self) -> None:
        for _, timer in self._held.values():
            timer.cancel()
        self._held.clear()
