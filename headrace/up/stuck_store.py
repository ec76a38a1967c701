"""Decides when `headrace up` starts its nats-server again because it stores nothing any more.

nats-server 2.15 takes messages for a stream that once could not be written, and never confirms them, also when the disk has
room again.  Only another start cures that.  Until there is room it would cure nothing, so the server is left alone while the
disk is full: leases are in memory, and streams go on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_MIB = 1 << 20

FULL_BYTES = 1 * _MIB  # less room than this counts as a full disk
ROOM_BYTES = 16 * _MIB  # with less room than this another start would not help for long
AFTER_FULL_S = 3.0  # of storing nothing, once a disk that was full has room
UNEXPLAINED_S = 20.0  # of storing nothing on a disk that was not seen full
AGAIN_FIRST_S = 10.0  # between two such starts; doubled while they do not help
AGAIN_MOST_S = 300.0


class StuckStore:
    """The rule. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.was_full = False
        self._since_s: float | None = None  # nothing is stored since
        self._not_before_s = 0.0
        self._again_s = AGAIN_FIRST_S

    def restart_due(self, now_s: float, *, stuck: bool, free_bytes: int) -> bool:
        """Return True when the server should be started again. `stuck`: requests cannot be stored just now."""
        self.was_full = self.was_full or free_bytes < FULL_BYTES
        if not stuck:
            self._since_s = None
            if now_s >= self._not_before_s:
                self._again_s = AGAIN_FIRST_S
            return False
        if self._since_s is None:
            self._since_s = now_s
        patience_s = AFTER_FULL_S if self.was_full else UNEXPLAINED_S
        return free_bytes >= ROOM_BYTES and now_s >= self._not_before_s and now_s - self._since_s >= patience_s

    def restarted(self, now_s: float) -> None:
        """Note that the server was started again."""
        self.was_full = False
        self._since_s = None
        self._not_before_s = now_s + self._again_s
        self._again_s = min(2 * self._again_s, AGAIN_MOST_S)


def free_bytes(folder: Path) -> int:
    """Return how much may still be written into a folder."""
    return shutil.disk_usage(folder).free
