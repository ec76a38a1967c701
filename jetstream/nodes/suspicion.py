"""Decides when the server of a connection is to be checked, and whether it is to be left.

Numbered probes are sent at the own server: a message, which is to arrive at another server, and a ping to each of the two. A
server stands still if it answers no pings. It may be cut off if it has answered the ping after a message, the other one answers
its pings as well, and the message does not arrive there. Neither is more than a reason to look at all other servers.
"""

from __future__ import annotations

from collections.abc import Mapping

LOST_S = 0.3  # for a message from one server to another
STILL_S = 0.4  # without an answer to a ping
SILENT_S = 0.75  # without an answer about storing; a call about a lease is given up after a second
REST_MOST_S = 8.0  # between two checks that found nothing
SETTLE_S = 2.0  # after a move
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


class Suspicion:
    """Decides when the server is to be checked: by what has had no answer, and less and less often while nothing is found."""

    def __init__(self) -> None:
        self._rest_s = 0.0
        self._not_before = 0.0

    def due(self, now: float, *, still_s: float = 0.0, lost_s: float = 0.0, silent_s: float = 0.0) -> bool:
        """Return True if the server is to be checked now.

        `still_s`: how long it has answered no ping. `lost_s`: how long a message has not arrived at another server. `silent_s`:
        how long a publish has had no answer.
        """
        if still_s < STILL_S and lost_s < LOST_S and silent_s < SILENT_S:
            if not (still_s or lost_s or silent_s) and now >= self._not_before:
                self._rest_s = 0.0
            return False
        return now >= self._not_before

    def cleared(self, now: float, chance: float) -> None:
        """Note a check that found nothing. `chance`, between 0 and 1, keeps the clients of a cluster apart."""
        self._rest_s = min(max(2 * self._rest_s, 1.0), REST_MOST_S)
        self._not_before = now + self._rest_s * (0.5 + chance / 2)

    def moved(self, now: float) -> None:
        """Note that another server was gone to."""
        self._rest_s = 0.0
        self._not_before = now + SETTLE_S


def is_cut_off(reached: Mapping[str, bool | None], *, answers: bool, open_: int = 0) -> bool | None:
    """Return True if a server is on the smaller side of a cluster, False if not, and None while that depends on open ones.

    `reached` has other servers: True if messages arrive there, False if it is alive and they do not, None if it is not alive.
    `answers`: the server itself answers pings. `open_`: the number of other servers of which nothing is known yet.
    """
    beyond = sum(1 for arrived in reached.values() if arrived is False)
    near = sum(1 for arrived in reached.values() if arrived) + (1 if answers else 0)
    if beyond > near + open_:
        return True
    return False if beyond + open_ <= near else None
