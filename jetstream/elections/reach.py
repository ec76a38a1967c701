"""Tells which servers of a cluster are cut off from most of the others, by what was sent at each and arrived at each."""

from __future__ import annotations


class Reach:
    """The times at which messages of one server last arrived at another. `size`: how many servers there are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: dict[str, dict[str, float]] = {}  # at this server: from that one, when

    def arrived(self, at: str, sender: str, now: float) -> None:
        """Note that what was sent at `sender` arrived at another server, or at the same one."""
        self._arrived.setdefault(at, {})[sender] = now

    def forget(self, server: str) -> None:
        """Forget what arrived at a server: there is a new connection to it, or none."""
        self._arrived.pop(server, None)

    def cut_off(self, now: float, silent_s: float) -> set[str]:
        """Return the servers where nothing arrived for so long from most of all servers, if there is one where it did.

        A server counts from the first message on that came to it from most others.
        """
        near = {at: sum(now - when < silent_s for when in of.values()) for at, of in self._arrived.items()}
        most = self._size // 2 + 1
        if all(count < most for count in near.values()):
            return set()
        return {at for at, count in near.items() if count < most and len(self._arrived[at]) >= most}
