"""Shares of tenants in a store that is full: whose values make room is decided here. Pure.

The tenant that has the most makes room, with its oldest values. So a tenant that has no more than its equal part of the store
loses nothing, however much others store, and one that is alone may use it all.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Victim(NamedTuple):
    """A value that makes room."""

    tenant: str
    key: str
    size: int


class StoreShares:
    """The values of all tenants, by key. They have to be told in the order in which they were stored."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, int]] = {}  # tenant -> key -> size, the oldest first
        self._bytes: dict[str, int] = {}
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def keep(self, key: str, tenant: str, size: int) -> None:
        """Take a value that was stored now, in place of an earlier one with its key."""
        self.drop(key)
        self._owners[key] = tenant
        self._held.setdefault(tenant, {})[key] = size
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size

    def drop(self, key: str) -> None:
        """Forget a value; an unknown one is fine."""
        tenant = self._owners.pop(key, None)
        if tenant is None:
            return
        held = self._held[tenant]
        self._bytes[tenant] -= held.pop(key)
        if not held:
            del self._held[tenant], self._bytes[tenant]

    def bytes_of(self, tenant: str) -> int:
        """Return the bytes of a tenant."""
        return self._bytes.get(tenant, 0)

    def take(self, wanted: int, *, most: int) -> list[Victim]:
        """Choose and forget values that have so many bytes together, at most `most` values: always of the largest tenant."""
        heap = [(-size, tenant) for tenant, size in self._bytes.items()]
        heapq.heapify(heap)
        taken: list[Victim] = []
        while heap and wanted > 0 and len(taken) < most:
            tenant = heap[0][1]
            key, size = next(iter(self._held[tenant].items()))
            self.drop(key)
            taken.append(Victim(tenant, key, size))
            wanted -= size
            if tenant in self._bytes:
                heapq.heapreplace(heap, (-self._bytes[tenant], tenant))
            else:
                heapq.heappop(heap)
        return taken
