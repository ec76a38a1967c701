"""Draws decisions from a key: the same key gives the same decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import shake_128
from typing import TypeVar

T = TypeVar("T")

_PART = 64  # bytes drawn at once


class Draws:
    """A stream of random decisions. Texts are made of `words`."""

    def __init__(self, key: bytes, words: Sequence[str]) -> None:
        self.words = words
        self._key = key
        self._part = 0
        self._left = b""

    def below(self, end: int) -> int:
        """Draw a number from 0 to `end` - 1; `end` is at least 1."""
        size = (end.bit_length() + 7) // 8 + 1
        while len(self._left) < size:
            self._left += shake_128(self._key + self._part.to_bytes(8, "little")).digest(_PART)
            self._part += 1
        drawn, self._left = self._left[:size], self._left[size:]
        return int.from_bytes(drawn, "little") % end

    def one_in(self, times: int) -> bool:
        """Draw true with a chance of one in so many."""
        return self.below(times) == 0

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def shuffled(self, values: Iterable[T]) -> list[T]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(len(left))]

    def word(self) -> str:
        return self.pick(self.words)
