"""Decode sequences that wait for blocks of another engine, and what vLLM would not notice about them.

vLLM reports a transfer that fails.  One that never comes (the prefill side died after it had been met, or has dropped the
blocks) it waits for without end, and the blocks of an aborted one stay taken until it comes.  Here such a wait has an end, and
the blocks are taken back once nobody can write into them: when the prefill side's lease has run out, which the decode side
renews until the sequence is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

STALL_S = 10.0  # vLLM gives a handshake five seconds; moving 1,500 tokens of a small model takes some tens of milliseconds
GRACE_S = 5.0  # beyond the lease, for what had begun before its end


class Fetches:
    """Keeps the time of those that wait; no I/O."""

    def __init__(self, *, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._waiting: dict[str, float | None] = {}  # request id: since when vLLM has been waiting for its blocks, if it has
        self._abandoned: dict[str, float] = {}  # request id: from when on its blocks may be taken back

    def __bool__(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self._waiting or self._abandoned)

    @property
    def waiting(self) -> list[str]:
        """Requests that may wait for blocks: those that `look` wants to hear of."""
        return list(self._waiting)

    def began(self, request_id: str) -> None:
        """A sequence that fetches blocks was submitted."""
        self._waiting[request_id] = None

    def ended(self, request_id: str) -> None:
        """It has a token, or vLLM has ended it."""
        self._waiting.pop(request_id, None)

    def aborted(self, request_id: str) -> None:
        """It was aborted; if it was still waiting its blocks may be stuck."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._abandoned[request_id] = self._clock() + self._lease_s + GRACE_S

    def look(self, receiving: Mapping[str, bool]) -> dict[str, str]:
        """Take note of who waits for blocks now and whether the other side can be reached, according to vLLM's workers.

        Returns who need not wait any longer, and why. A sequence that waits for a place or for memory of its own is not
        receiving yet, and its time does not run.
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
        """Abandoned requests whose blocks nobody can write into any more; they are forgotten here."""
        now = self._clock()
        ripe = [request_id for request_id, when in self._abandoned.items() if when <= now]
        for request_id in ripe:
            del self._abandoned[request_id]
        return ripe
