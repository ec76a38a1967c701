"""Keeps requests from waiting again and again for a store that does not answer. Sans-io."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 1.0
LONGEST_S = 30.0


class Breaker:
    """Lets nothing through for a while after a failure, twice as long after each further one."""

    def __init__(self, clock: Callable[[], float], *, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._clock = clock
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s = 0.0
        self._until = float("-inf")

    @property
    def closed(self) -> bool:
        """Return whether the store may be asked."""
        return self._clock() >= self._until

    def failed(self) -> None:
        """Note a failure. Those of requests that were let through together count once."""
        if not self.closed:
            return
        self._pause_s = min(self._longest_s, self._pause_s * 2 or self._first_s)
        self._until = self._clock() + self._pause_s

    def succeeded(self) -> None:
        """Note that the store has answered."""
        self._pause_s = 0.0
        self._until = float("-inf")
