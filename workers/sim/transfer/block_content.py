"""The layout of a block's bytes: the cell it holds, and a checksum that shows whether they all arrived.

    cell (8 bytes) | xxh3 of the body, xor cell (8 bytes) | body: a pattern, xor cell

Bodies are written when a block is put on offer and not when it is computed: a simulator need not copy more than it hands over.
A later overwrite changes only the first sixteen bytes; they are then valid, but of another cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headrace.workers.nixl.arena import Arena

LEAST_BYTES = 64  # smallest block; a multiple of 8
_HEAD = 2  # words
_ODD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Contents:
    """The contents of one arena's blocks."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        words = arena.block_bytes // 8 - _HEAD
        self._pattern: NDArray[np.uint64] = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_ODD)
        self._sound: set[int] = set()  # blocks whose checksum is right, as far as is known
        self._changes = 0

    def stamp(self, block: int, cell: int) -> None:
        """Write this cell into this block."""
        words = self._words(block)
        if block in self._sound and int(words[0]) == cell:
            return
        body = words[_HEAD:]
        np.bitwise_xor(self._pattern, np.uint64(cell), out=body)
        words[0] = cell
        words[1] = xxh3_64_intdigest(body.data) ^ cell
        self._sound.add(block)

    def overwrite(self, block: int) -> None:
        """Change this block to another, unknown cell."""
        words = self._words(block)
        self._changes += 1
        change = self._changes * _ODD & _WORD
        words[0] = int(words[0]) ^ change
        words[1] = int(words[1]) ^ change

    def expect(self, blocks: Sequence[int]) -> None:
        """Expect writes of other engines to these blocks from now on."""
        self._sound.difference_update(blocks)

    def read(self, block: int) -> int | None:
        """Read the cell of this block. Returns None when its checksum is wrong."""
        words = self._words(block)
        cell = int(words[0])
        if int(words[1]) != xxh3_64_intdigest(words[_HEAD:].data) ^ cell:
            return None
        self._sound.add(block)
        return cell

    def _words(self, block: int) -> NDArray[np.uint64]:
        return self._arena.view(block).view(np.uint64)
