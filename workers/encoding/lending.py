"""Keeps records of an encode worker in memory that serving workers read over NIXL, without this worker's doing."""

from __future__ import annotations

import asyncio

from headrace.broker.messages.encoding import LentRecord
from headrace.workers.encoding.shelf import Shelf
from headrace.workers.nixl.agent import Agent
from headrace.workers.nixl.arena import Arena

BLOCK_BYTES = 64 << 10
LENT_BYTES = 256 << 20
"""Memory for records in an encode worker; the embeddings of some 50 images of 1,000 tokens of a model of 7 billion weights."""


class LentMemory:
    """The newest records, as offers. Takes half a second to make, in a thread."""

    def __init__(self, name: str, *, least_bytes: int, most_bytes: int = LENT_BYTES) -> None:
        """`least_bytes`: smaller records go by the object store. Raises NixlUnavailable, DriverFailed."""
        blocks = max(1, most_bytes // BLOCK_BYTES)
        self._arena = Arena(blocks, BLOCK_BYTES)
        self._agent = Agent(name, self._arena)
        self._shelf = Shelf(blocks, BLOCK_BYTES)
        self._least_bytes = least_bytes

    async def run(self) -> None:
        """Lend until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            self._agent.close()

    def find(self, name: str) -> LentRecord | None:
        """Offer a record that is here already."""
        place = self._shelf.find(name)
        return LentRecord(card=self._agent.card, first=place.first, size=place.size) if place is not None else None

    async def lend(self, name: str, record: bytes) -> LentRecord | None:
        """Keep a record and offer it. None: it is too small or too large for this, or there is no room just now."""
        if len(record) < self._least_bytes:
            return None
        place = self._shelf.add(name, len(record))
        if place is None:
            return None
        await asyncio.to_thread(self._arena.write, place.first, record)
        return self.find(name)

    async def record(self, lent: LentRecord) -> bytes:
        """Return the bytes of a record, for those who cannot read them by themselves."""
        return await asyncio.to_thread(self._arena.read, lent.first, lent.size)
