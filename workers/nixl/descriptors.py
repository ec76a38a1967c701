"""Block numbers prepared for NIXL: pairs in the best order, cut into parts. No I/O."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.workers.errors import EngineStartFailed, TransferFailed, WorkerError

# Defines every exception that can leave `workers/nixl/`.
#
# WorkerError
# ├── EngineStartFailed
# │   └── NixlUnavailable    NIXL or the backend we need is not there: the message says what to install
# ├── BadCard                a peer's card cannot be used: damaged, another version, blocks of another size
# ├── BadBlocks              block numbers that name no block, name one twice, or do not pair up
# └── TransferFailed         (retriable)
#     ├── PeerUnknown        this peer was never met, or is gone
#     ├── BlocksBusy         a transfer given up earlier may still touch these blocks
#     ├── DriverFailed       NIXL refused a call
#     │   └── PeerGone       NIXL says that the peer is not there any more
#     └── Closed             this agent was closed


class NixlUnavailable(EngineStartFailed):
    """NIXL, or a backend of it, is not installed or does not load."""


class BadCard(WorkerError):
    """A peer's card cannot be used."""


class BadBlocks(WorkerError):
    """The block numbers make no valid transfer."""


class PeerUnknown(TransferFailed):
    """The peer was never met, or was dropped."""


class BlocksBusy(TransferFailed):
    """A transfer that was given up has not let go of the blocks yet."""


class DriverFailed(TransferFailed):
    """NIXL refused a call."""


class PeerGone(DriverFailed):
    """NIXL found the peer disconnected."""


class Closed(TransferFailed):
    """The agent was closed."""


Indices = NDArray[np.int32]

PART_BYTES = 16 << 20
"""Between processes of one machine the backend copies while a part is handed over, so this bounds how long a call may take:
1.5 to 4 ms at 4 to 11 GB/s.  Each part costs some 0.1 ms beside the copying: with 8 MiB ours had 88 % of bare NIXL's speed."""
PART_RUNS = 512
"""The same bound for scattered blocks, which cost 5 to 12 µs each however small they are."""


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorRun:
    """Pairs of blocks handed to NIXL in one go. `runs`: how many ranges they are when neighbours are merged."""

    local: Indices
    remote: Indices
    runs: int


def indices(blocks: Sequence[int], count: int, side: str) -> Indices:
    """Check block numbers and convert them for NIXL. Raises BadBlocks for one that is not in 0…`count`-1."""
    try:
        numbers = np.asarray(blocks, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise BadBlocks(f"{side} block numbers are not plain integers: {error}") from None
    if numbers.ndim != 1:
        raise BadBlocks(f"{side} block numbers must be a flat list, not of shape {numbers.shape}")
    if numbers.size and (numbers.min() < 0 or numbers.max() >= count):
        wrong = numbers[(numbers < 0) | (numbers >= count)][0]
        raise BadBlocks(f"{side} block {wrong} does not exist: there are {count}")
    return numbers.astype(np.int32)


def pair(local: Indices, remote: Indices, *, into: Literal["local", "remote"]) -> tuple[Indices, Indices]:
    """Sort the pairs by the blocks written to; the order of pairs means nothing, and this one leaves the
    fewest runs: a free list hands blocks out in any order, often a falling one.

    Raises BadBlocks for sides of different length, no pairs at all, and a block that would be written twice.
    """
    if len(local) != len(remote):
        raise BadBlocks(f"{len(local)} local blocks cannot be paired with {len(remote)} remote blocks")
    if not len(local):
        raise BadBlocks("a transfer needs at least one block")
    target = local if into == "local" else remote
    steps = np.diff(target)
    if (steps <= 0).any():
        order = np.argsort(target, kind="stable")
        local, remote, target = local[order], remote[order], target[order]
        if twice := np.flatnonzero(np.diff(target) == 0).tolist():
            raise BadBlocks(f"{into} block {target[twice[0]]} would be written twice")
    return local, remote


def run_starts(local: Indices, remote: Indices) -> NDArray[np.intp]:
    """Find the starts of runs: within a run the numbers go up by one on both sides."""
    return np.flatnonzero(np.concatenate(([True], (np.diff(local) != 1) | (np.diff(remote) != 1))))


def cut(
    local: Indices, remote: Indices, *, block_bytes: int, part_bytes: int = PART_BYTES, part_runs: int = PART_RUNS
) -> list[DescriptorRun]:
    """Cut the pairs into parts of at most `part_bytes` (but at least one block) and `part_runs`, in order."""
    most = max(1, part_bytes // block_bytes)
    starts = run_starts(local, remote)
    parts: list[DescriptorRun] = []
    begin, first = 0, 0  # `first`: the run that holds the pair at `begin`
    while begin < len(local):
        end = min(begin + most, len(local))
        if first + part_runs < len(starts):
            end = min(end, int(starts[first + part_runs]))
        after = int(np.searchsorted(starts, end, side="left"))
        parts.append(DescriptorRun(local[begin:end], remote[begin:end], after - first))
        first = after if after < len(starts) and starts[after] == end else after - 1
        begin = end
    return parts


# Memory that other processes may read and write, in blocks.


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
