"""Bounds the memory of request bodies that are still arriving, over all connections and for each address.

One body is bounded by its own limit; thousands of slow ones together are not.  A body that is over the budget is refused, and
its client may try again.  The first bytes of every body are free, so that ordinary requests go on beside an attack.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.frontend.errors import BodiesFull

FREE_BYTES = 64 * 1024  # of each body
PEER_SHARE = 0.5  # of the budget, for one address; clients behind a proxy share one
RETRY_AFTER_S = 1.0


class BodyBudget:
    """The bytes that bodies which have not arrived in full hold in memory. `on_change` is called with their sum."""

    def __init__(self, most: int, on_change: Callable[[float], None] = lambda _held: None) -> None:
        self.most = most
        self.held = 0
        self._by_peer: dict[str, int] = {}
        self._on_change = on_change

    def share(self, peer: str) -> BodyShare:
        """Return the part of one body, to be closed when it has arrived or was given up."""
        return BodyShare(self, peer)

    def add(self, peer: str, size: int) -> None:
        """Count bytes of a body. Raises BodiesFull, and counts none, if they are too many."""
        of_peer = self._by_peer.get(peer, 0) + size
        if self.held + size > self.most:
            message = f"bodies that are still arriving hold {self.held} of {self.most} bytes; try again shortly"
            raise BodiesFull(message, retry_after_s=RETRY_AFTER_S)
        if of_peer > self.most * PEER_SHARE:
            message = f"bodies of this address that are still arriving hold {of_peer - size} bytes; try again shortly"
            raise BodiesFull(message, retry_after_s=RETRY_AFTER_S)
        self.held += size
        self._by_peer[peer] = of_peer
        self._on_change(self.held)

    def remove(self, peer: str, size: int) -> None:
        """Count bytes no longer."""
        self.held -= size
        left = self._by_peer.get(peer, 0) - size
        if left > 0:
            self._by_peer[peer] = left
        else:
            self._by_peer.pop(peer, None)
        self._on_change(self.held)


class BodyShare:
    """The part of the budget that one body holds."""

    __slots__ = ("_budget", "_counted", "_peer", "_size")

    def __init__(self, budget: BodyBudget, peer: str) -> None:
        self._budget = budget
        self._peer = peer
        self._size = 0
        self._counted = 0

    def add(self, size: int) -> None:
        """Count a part of the body. Raises BodiesFull."""
        self._size += size
        more = max(0, self._size - FREE_BYTES) - self._counted
        if more:
            self._budget.add(self._peer, more)
            self._counted += more

    def close(self) -> None:
        """Give everything back."""
        if self._counted:
            self._budget.remove(self._peer, self._counted)
            self._counted = 0
