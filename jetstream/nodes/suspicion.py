"""Decides when the server of a connection is to be checked, and whether it is to be left."""

from __future__ import annotations

from collections.abc import Mapping

LOST_S = 0.3  # for a message from one server to another
STILL_S = 0.4  # without an answer to a ping
SILENT_S = 0.75  # without an answer about storing; a call about a lease is given up after a second
REST_MOST_S = 8.0  # between two checks that found nothing
SETTLE_S = 2.0  # after a move


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
