"""What the bytes of a block say: which cell it holds, and whether they all came through.

    cell (8 bytes) | xxh3 of the body, xor cell (8 bytes) | body: a pattern, xor cell

Bodies are written when a block is put on offer and not when it is computed: a simulator need not copy more than it hands over.
What happens to a block afterwards changes its first sixteen bytes only; they are then right, of something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headrace.workers.sim.transfer.nixl.arena import Arena

LEAST_BYTES = 64  # of a block; a multiple of 8
_HEAD = 2  # words
_ODD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Contents:
    """The blocks of one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        words = arena.block_bytes // 8 - _HEAD
        self._pattern: NDArray[np.uint64] = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_ODD)
        self._sound: set[int] = set()  # blocks whose bytes agree with each other, as far as is known
        self._changes = 0

    def stamp(self, block: int, cell: int) -> None:
        """This block holds this cell."""
        words = self._words(block)
        if block in self._sound and int(words[0]) == cell:
            return
        body = words[_HEAD:]
        np.bitwise_xor(self._pattern, np.uint64(cell), out=body)
        words[0] = cell
        words[1] = xxh3_64_intdigest(body.data) ^ cell
        self._sound.add(block)

    def overwrite(self, block: int) -> None:
        """This block holds something else now, nobody knows what."""
        words = self._words(block)
        self._changes += 1
        change = self._changes * _ODD & _WORD
        words[0] = int(words[0]) ^ change
        words[1] = int(words[1]) ^ change

    def expect(self, blocks: Sequence[int]) -> None:
        """Others write to these from now on."""
        self._sound.difference_update(blocks)

    def read(self, block: int) -> int | None:
        """The cell that this block holds; None when its bytes do not belong together."""
        words = self._words(block)
        cell = int(words[0])
        if int(words[1]) != xxh3_64_intdigest(words[_HEAD:].data) ^ cell:
            return None
        self._sound.add(block)
        return cell

    def _words(self, block: int) -> NDArray[np.uint64]:
        return self._arena.view(block).view(np.uint64)
