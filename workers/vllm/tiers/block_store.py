"""Declares a store of sealed blocks: what a tier behind the host tier keeps them in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class StoreFailed(Exception):
    """The store could not do what it was asked for: it is gone, full, or refuses. Another time it may."""


class BlockAbsent(Exception):
    """The store does not have the block."""


class BlockStore(Protocol):
    """Records of blocks by name. Used by one event loop; every call may be cancelled."""

    async def held(self, names: Sequence[str]) -> Collection[str]:
        """Return which of these the store has. Raises StoreFailed."""

    async def read(self, name: str) -> bytes:
        """Read a record. Raises BlockAbsent, StoreFailed."""

    async def write(self, name: str, record: bytes) -> Sequence[str]:
        """Write a record and return the names of those that made room. Raises StoreFailed."""

    async def remove(self, name: str) -> None:
        """Remove a record that is of no use. Raises StoreFailed."""

    async def close(self) -> None:
        """Let go of everything. Raises nothing."""
