"""Counts what an owner uses in windows of fixed length: what this frontend counted, and what all of them had at last sight."""

from __future__ import annotations


class UsageWindow:
    """A quantity of an owner. `limit` 0 counts without a limit.

    What was counted here goes to the server by `take`, and `learn` brings the sum of all frontends back. Until then only the
    own part is known, so the sum may be behind by what the others have counted since.
    """

    __slots__ = ("_begins", "_ends", "_late", "_number", "_sending", "_total", "_unsent", "length_s", "limit")

    def __init__(self, length_s: float, limit: int) -> None:
        self.length_s = length_s
        self.limit = limit
        self._number = -1
        self._begins = self._ends = 0.0  # of the window that is counted, Unix time
        self._total = self._sending = self._unsent = 0
        self._late: list[tuple[int, int]] = []  # of windows that are over

    def used(self, now: float) -> int:
        """Return what is known to be used in the window of Unix time `now`."""
        if not self._begins <= now < self._ends:
            self._turn(now)
        return self._total + self._sending + self._unsent

    def room(self, now: float) -> int:
        """Return what is left, less than 0 if too much was used. Call it only with a limit."""
        if not self._begins <= now < self._ends:
            self._turn(now)
        return self.limit - self._total - self._sending - self._unsent

    def ends_in_s(self, now: float) -> float:
        """Return the seconds until the window is over and a new one begins."""
        return self.length_s - now % self.length_s

    def number(self, now: float) -> int:
        """Return the number of the window of Unix time `now`."""
        return int(now // self.length_s)

    def add(self, now: float, amount: int) -> None:
        """Count in the window of `now`; a negative amount gives back."""
        if not self._begins <= now < self._ends:
            self._turn(now)
        self._unsent += amount

    def take(self, now: float) -> list[tuple[int, int]]:
        """Return (window, amount) of what is to be sent, and forget it until `learn` or `failed` says what became of it."""
        if not self._begins <= now < self._ends:
            self._turn(now)
        taken, self._late = self._late, []
        if self._unsent and not self._sending:
            taken.append((self._number, self._unsent))
            self._sending, self._unsent = self._unsent, 0
        return taken

    def learn(self, window: int, total: int | None) -> None:
        """Take the sum of all frontends, which includes what was sent. None: the server does not count."""
        if window == self._number:
            self._total = self._total + self._sending if total is None else total
            self._sending = 0

    def failed(self, window: int, amount: int) -> None:
        """Keep what could not be sent."""
        if window == self._number and self._sending:
            self._unsent += self._sending
            self._sending = 0
        else:
            self._late.append((window, amount))

    def _turn(self, now: float) -> None:
        number = self.number(now)
        if self._unsent:
            self._late.append((self._number, self._unsent))
        self._number = number
        self._begins, self._ends = number * self.length_s, (number + 1) * self.length_s
        self._total = self._sending = self._unsent = 0
