"""Backoff between routers: with several of them, each waits a turn before it uses the new room of a worker.

All routers of a pool see the same report at about the same time, and each has a request for that worker.  If all placed at
once, the worker would get several requests where it had room for one; and the shortest work of all should go first, not the
shortest of the router that is quickest.  So each waits before it uses a worker's new room, the longer the more work it means
to place, and among equals in an order drawn from the worker's name and the number of its report; the others hear of the first
placement (a backoff like that of a shared wire, with the priority as the time).  Room opens well before the engine runs dry,
so the wait costs nothing while the pool is busy; a worker that has had room for longer is open to all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import xxhash

from headrace.router.placement.load import LoadTable, WorkerLoad

_SHORT_S = 0.02  # work that waits one turn; twice as much waits about one more


class RouterBackoff:
    """Keeps the turns of one router."""

    def __init__(self, name: str, turn_s: float) -> None:
        self._name = name
        self._turn_s = turn_s
        self.next_s = float("inf")  # when its next turn comes

    def note_rooms(self, room: Sequence[bool], loads: LoadTable, now_s: float) -> None:
        """Note which workers have had room since when."""
        self.next_s = float("inf")
        for load in loads:
            self.note_room(load, room=room[load.column], now_s=now_s)

    @staticmethod
    def note_room(load: WorkerLoad, *, room: bool, now_s: float) -> None:
        """Note whether this worker has room now. Room that opened while nothing waited here is open to all routers."""
        if not room:
            load.opened_s = None
        elif load.opened_s is None:
            load.opened_s = now_s

    def note_no_room(self, loads: LoadTable) -> None:
        """Note that no worker has room."""
        self.next_s = float("inf")
        for load in loads:
            load.opened_s = None

    def must_wait(self, load: WorkerLoad, routers: Sequence[str], service_s: float, now_s: float) -> bool:
        """Return whether work of this length has to leave this worker to other routers for now."""
        if len(routers) < 2 or load.opened_s is None:
            return False
        turns = log2(1.0 + service_s / _SHORT_S) + self._place(load, routers) / len(routers)
        mine_s = load.opened_s + self._turn_s * turns
        if now_s >= mine_s - 1e-9:
            return False
        self.next_s = min(self.next_s, mine_s)
        return True

    def _place(self, load: WorkerLoad, routers: Sequence[str]) -> int:
        """Count the routers that come before this one, all else being equal."""
        number = load.report.n if load.report is not None else 0
        key = f"{load.info.worker} {number} ".encode()
        own = xxhash.xxh3_64_intdigest(key + self._name.encode())
        return sum(xxhash.xxh3_64_intdigest(key + name.encode()) > own for name in routers if name != self._name)
