"""Decisions drawn from a key: the same key, the same decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import shake_128
from typing import TypeVar

T = TypeVar("T")

_PART = 64  # bytes drawn at once


class Draws:
    """A stream of decisions. `words` are what texts are made of."""

    def __init__(self, key: bytes, words: Sequence[str]) -> None:
        self.words = words
        self._key = key
        self._part = 0
        self._left = b""

    def below(self, end: int) -> int:
        """A number from 0 to `end` - 1; `end` is at least 1."""
        size = (end.bit_length() + 7) // 8 + 1
        while len(self._left) < size:
            self._left += shake_128(self._key + self._part.to_bytes(8, "little")).digest(_PART)
            self._part += 1
        drawn, self._left = self._left[:size], self._left[size:]
        return int.from_bytes(drawn, "little") % end

    def one_in(self, times: int) -> bool:
        """True once in so many times."""
        return self.below(times) == 0

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def shuffled(self, values: Iterable[T]) -> list[T]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(len(left))]

    def word(self) -> str:
        return self.pick(self.words)
