"""Tells by numbered probes whether the server of a connection may stand still or be cut off.

A probe is a message, sent at the own server, which is to arrive at another one, and a ping to each of the two. A server stands
still if it answers no pings. It may be cut off if it has answered the ping after a message, the other one answers its pings as
well, and the message does not arrive there. Neither is more than a reason to look at all other servers.
"""

from __future__ import annotations

MOST = 50  # probes without an answer; more are sent under the last number


class Probes:
    """The probes of one connection that have not been answered, or have not arrived."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}  # loop times of those that have not arrived everywhere
        self._last = 0
        self._own = 0  # the last one whose ping the own server has answered
        self._other = 0  # the same for the other server
        self._arrived = 0  # the last one whose message has arrived at the other server
        self._from = 0  # the last one before the other server was watched

    def send(self, now: float) -> int:
        """Return the number of a probe that is sent now."""
        if len(self._sent) >= MOST:
            return self._last
        self._last += 1
        self._sent[self._last] = now
        return self._last

    def own_answered(self, number: int) -> None:
        """Note that the own server has answered the ping of a probe."""
        self._own = max(self._own, number)
        self._forget()

    def other_answered(self, number: int) -> None:
        """Note that the other server has answered the ping of a probe."""
        self._other = max(self._other, number)
        self._forget()

    def arrived(self, number: int) -> None:
        """Note that the message of a probe has arrived at the other server."""
        self._arrived = max(self._arrived, number)
        self._forget()

    def own_changed(self) -> None:
        """Forget all probes: there is a new connection, or none."""
        self._sent.clear()
        self._own = self._from = self._last

    def other_changed(self) -> None:
        """Expect only probes that are sent from now on to arrive at the other server, because it is another one."""
        self._from = self._last
        self._forget()

    def still_s(self, now: float) -> float:
        """Return how long the own server has answered no ping."""
        return self._since(self._own, now)

    def other_still_s(self, now: float) -> float:
        """Return how long the other server has answered no ping."""
        return self._since(max(self._from, self._other), now)

    def lost_s(self, now: float) -> float:
        """Return how long a message has not arrived that both servers have had the time to pass on, 0 if there is none."""
        first = max(self._from, self._arrived) + 1
        if first > min(self._own, self._other):
            return 0.0
        return self._since(first - 1, now)

    def _since(self, done: int, now: float) -> float:
        sent = self._sent.get(done + 1)
        return 0.0 if sent is None else max(0.0, now - sent)

    def _forget(self) -> None:
        done = min(self._own, max(self._from, min(self._other, self._arrived)))
        for number in [n for n in self._sent if n <= done]:
            del self._sent[number]
