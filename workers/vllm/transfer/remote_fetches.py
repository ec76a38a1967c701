"""Limits the time for which decode sequences wait for blocks of another engine, and reclaims the blocks of aborted ones.

vLLM reports a transfer that fails. It waits without end for one that never comes (the prefill side died after the handshake, or
has dropped the blocks), and the blocks of an aborted sequence stay in use until the transfer comes. Here such a wait has a
limit, and the blocks are reclaimed once no engine can write into them: when the prefill side's lease has run out, which the
decode side renews until the sequence is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

STALL_S = 10.0  # vLLM gives a handshake five seconds; moving 1,500 tokens of a small model takes some tens of milliseconds
GRACE_S = 5.0  # beyond the lease, for transfers that had begun before its end


class Fetches:
    """Keeps the waiting times of fetches. Sans-io."""

    def __init__(self, *, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._waiting: dict[str, float | None] = {}  # by request id: the start of vLLM's wait for blocks, if it waits
        self._abandoned: dict[str, float] = {}  # by request id: the time from which its blocks may be reclaimed

    def __bool__(self) -> bool:
        """Return whether any fetch has to be watched."""
        return bool(self._waiting or self._abandoned)

    @property
    def waiting(self) -> list[str]:
        """Return the requests that may wait for blocks, of which `look` needs the state."""
        return list(self._waiting)

    def began(self, request_id: str) -> None:
        """Record that a sequence that fetches blocks was submitted."""
        self._waiting[request_id] = None

    def ended(self, request_id: str) -> None:
        """Record that a sequence has a token, or that vLLM has ended it."""
        self._waiting.pop(request_id, None)

    def aborted(self, request_id: str) -> None:
        """Record that a sequence was aborted; if it was still waiting its blocks may be stuck."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._abandoned[request_id] = self._clock() + self._lease_s + GRACE_S

    def look(self, receiving: Mapping[str, bool]) -> dict[str, str]:
        """Update the waits: `receiving` has the requests that wait for blocks, and whether the other side is reachable.

        Returns the requests that need not wait any longer, with the reasons. A sequence that waits for a slot or for memory of
        its own is not receiving yet, and its time does not run.
        """
        now = self._clock()
        hopeless = {}
        for request_id, since in self._waiting.items():
            if request_id not in receiving:
                self._waiting[request_id] = None
            elif not receiving[request_id]:
                hopeless[request_id] = "the prefill side cannot be reached any more"
            elif since is None:
                self._waiting[request_id] = now
            elif now - since >= STALL_S:
                hopeless[request_id] = f"no blocks came from the prefill side for {STALL_S:.0f} s"
        return hopeless

    def due(self) -> list[str]:
        """Return and forget the abandoned requests whose blocks no engine can write into any more."""
        now = self._clock()
        ripe = [request_id for request_id, when in self._abandoned.items() if when <= now]
        for request_id in ripe:
            del self._abandoned[request_id]
        return ripe
