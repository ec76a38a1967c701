"""Memory that other processes may read and write, in blocks."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from headrace.workers.nixl.errors import BadBlocks


class Arena:
    """`blocks` equal blocks of host memory, one after the other, starting at a page.

    The memory is touched here: the first touch of a page costs ten times its copying, and no transfer should pay that.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        if blocks < 1 or block_bytes < 1:
            raise BadBlocks(f"an arena of {blocks} blocks of {block_bytes} bytes holds nothing")
        self.blocks = blocks
        self.block_bytes = block_bytes
        memory = mmap.mmap(-1, blocks * block_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)  # a reference keeps the mapping alive
        self._bytes.fill(0)
        self.address: int = self._bytes.ctypes.data

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.blocks * self.block_bytes

    def view(self, block: int) -> NDArray[np.uint8]:
        """Return the bytes of one block, writable. Raises BadBlocks."""
        if not 0 <= block < self.blocks:
            raise BadBlocks(f"block {block} does not exist: there are {self.blocks}")
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def write(self, first: int, data: bytes) -> None:
        """Put bytes into blocks from this one on. Raises BadBlocks."""
        self._span(first, len(data))[:] = np.frombuffer(data, dtype=np.uint8)

    def read(self, first: int, size: int) -> bytes:
        """Return bytes from the beginning of this block on. Raises BadBlocks."""
        return self._span(first, size).tobytes()

    def _span(self, first: int, size: int) -> NDArray[np.uint8]:
        start = first * self.block_bytes
        if first < 0 or size < 0 or start + size > self.size:
            raise BadBlocks(f"{size} bytes from block {first} on do not lie in {self.blocks} blocks of {self.block_bytes}")
        return self._bytes[start : start + size]
