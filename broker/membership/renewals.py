"""Finds the members whose leases are not renewed any more while those of others are.

In a cluster of NATS servers leases outlast an election of their leader, during which none can be renewed.  A member that is
frozen or cut off is therefore not missed by its TTL alone.  The watch tells every reader of each renewal; a member without one
for some seconds is overdue, if the renewals of others came all the time.
"""

from __future__ import annotations

GAP_S = 2.0  # the members renew every 1.3 s at least; if no renewal came for longer, the server took none


class Renewals:
    """The renewals of one deployment's leases, as one watch has reported them. Times are seconds on one monotonic clock."""

    def __init__(self, overdue_s: float) -> None:
        """`overdue_s`: the time without a renewal after which a member is overdue; 0 = never."""
        self._overdue_s = overdue_s
        self._last: dict[str, tuple[float, int]] = {}  # when the last renewal of a key came, and its revision
        self._latest = float("-inf")  # when any renewal came
        self._steady_since = float("-inf")  # renewals have come without a gap since then

    def note(self, key: str, revision: int, now: float) -> None:
        """Note that a lease was written."""
        if now - self._latest > GAP_S:
            self._steady_since = now
        self._latest = now
        self._last[key] = (now, revision)

    def forget(self, key: str) -> None:
        """Note that a lease has ended."""
        self._last.pop(key, None)

    def overdue(self, key: str, now: float) -> int:
        """Return the revision of a lease that is overdue, and 0 for any other."""
        at, revision = self._last.get(key, (now, 0))
        if not self._overdue_s or now - self._latest > GAP_S or now - max(at, self._steady_since) < self._overdue_s:
            return 0
        return revision
