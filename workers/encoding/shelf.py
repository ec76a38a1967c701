"""Chooses the places of records in a ring of equal blocks: a new record takes those of the oldest ones. No I/O, no memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

REST_S = 10.0
"""How long a record is left alone after it was offered, so that those who were told of it have read it by then."""


@dataclass(frozen=True, slots=True)
class Place:
    """`size` bytes in `count` blocks from `first` on."""

    first: int
    count: int
    size: int

    def overlaps(self, first: int, count: int) -> bool:
        return self.first < first + count and first < self.first + self.count


class Shelf:
    """The places of the newest records, by name."""

    def __init__(
        self, blocks: int, block_bytes: int, *, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._rest_s = rest_s
        self._clock = clock
        self._next = 0
        self._places: dict[str, Place] = {}
        self._offered_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> Place | None:
        """Return the place of a record that is about to be offered, or None if it is not there."""
        place = self._places.get(name)
        if place is not None:
            self._offered_s[name] = self._clock()
        return place

    def add(self, name: str, size: int) -> Place | None:
        """Give a record a place. None: it is larger than everything, or would take that of one which may just be read."""
        count = max(1, -(-size // self._block_bytes))
        if count > self._blocks:
            return None
        self.drop(name)
        first = self._next if self._next + count <= self._blocks else 0
        taken = [other for other, place in self._places.items() if place.overlaps(first, count)]
        now_s = self._clock()
        if any(now_s - self._offered_s[other] < self._rest_s for other in taken):
            return None
        for other in taken:
            self.drop(other)
        place = Place(first, count, size)
        self._places[name] = place
        self._offered_s[name] = now_s
        self._next = first + count
        return place

    def drop(self, name: str) -> None:
        """Forget a record; an absent one is fine."""
        self._places.pop(name, None)
        self._offered_s.pop(name, None)
