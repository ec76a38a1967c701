"""Counts what an owner uses in windows of fixed length: what this frontend counted, and what all of them had at last sight."""

from __future__ import annotations


class UsageWindow:
    """A quantity of an owner. `limit` 0 counts without a limit.

    What was counted here goes to the server by `take`, and `learn` brings the sum of all frontends back. Until then only the
    own part is known, so the sum may be behind by what the others have counted since.

    `left` is what is left of the limit in the window from `begins` to `ends` (Unix time), less than 0 if too much was used;
    `unsent` is what was counted since the last `take`. Who has called `turn` for the time may use them without a call.
    """

    __slots__ = ("_late", "_number", "_sending", "begins", "ends", "left", "length_s", "limit", "unsent")

    def __init__(self, length_s: float, limit: int) -> None:
        self.length_s = length_s
        self.limit = limit
        self._number = -1
        self.begins = self.ends = 0.0
        self.left = limit
        self._sending = self.unsent = 0
        self._late: list[tuple[int, int]] = []  # of windows that are over

    def limit_to(self, limit: int) -> None:
        """Hold another limit from now on. What was used stays used."""
        self.left += limit - self.limit
        self.limit = limit

    def used(self, now: float) -> int:
        """Return what is known to be used in the window of Unix time `now`."""
        return self.limit - self.room(now)

    def room(self, now: float) -> int:
        """Return what is left, less than 0 if too much was used. Call it only with a limit."""
        self.turn(now)
        return self.left

    def ends_in_s(self, now: float) -> float:
        """Return the seconds until the window is over and a new one begins."""
        return self.length_s - now % self.length_s

    def number(self, now: float) -> int:
        """Return the number of the window of Unix time `now`."""
        return int(now // self.length_s)

    def add(self, now: float, amount: int) -> None:
        """Count in the window of `now`; a negative amount gives back."""
        self.turn(now)
        self.left -= amount
        self.unsent += amount

    def take(self, now: float) -> list[tuple[int, int]]:
        """Return (window, amount) of what is to be sent, and forget it until `learn` or `failed` says what became of it."""
        self.turn(now)
        taken, self._late = self._late, []
        if self.unsent and not self._sending:
            taken.append((self._number, self.unsent))
            self._sending, self.unsent = self.unsent, 0
        return taken

    def learn(self, window: int, total: int | None) -> None:
        """Take the sum of all frontends, which includes what was sent. None: the server does not count."""
        if window == self._number:
            if total is not None:
                self.left = self.limit - total - self.unsent
            self._sending = 0

    def failed(self, window: int, amount: int) -> None:
        """Keep what could not be sent."""
        if window == self._number and self._sending:
            self.unsent += self._sending
            self._sending = 0
        else:
            self._late.append((window, amount))

    def turn(self, now: float) -> None:
        """Begin the window of Unix time `now`, if another one was counted so far."""
        if self.begins <= now < self.ends:
            return
        number = self.number(now)
        if self.unsent:
            self._late.append((self._number, self.unsent))
        self._number = number
        self.begins, self.ends = number * self.length_s, (number + 1) * self.length_s
        self.left, self._sending, self.unsent = self.limit, 0, 0
