"""Records of a reader: one worker's reading position, its inventory under way, and its part of a snapshot."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.router.index.types import PrefixIndex, Tier

NO_EPOCH = -1

Packed = bytes | bytearray | memoryview

MAX_STEP_BLOCKS = 131_072  # of one message: more than the server's usual 1 MiB can hold
PART_BLOCKS = 16_384  # read from the index at a time
MAX_DUMP_BLOCKS = 8_388_608  # of one worker's inventory: 64 MiB
MAX_GATHERED_BLOCKS = 4 * MAX_DUMP_BLOCKS  # of all inventories that are not complete


class WorkerSlice(NamedTuple):
    """A snapshot's part for one worker: everything of this worker up to stream sequence `seq` is in it, and nothing later."""

    worker: str
    epoch: int
    previous: int
    n: int
    seq: int
    complete: bool
    blocks: Mapping[Tier, Packed]


@dataclass(slots=True)
class InventoryParts:
    """An inventory whose last part has not come yet.

    `epoch`, `n`, `seq` and `complete` are the worker's state before its first part: a snapshot taken meanwhile has these, so
    that a replay reads all the parts again.
    """

    dump: int
    epoch: int
    n: int
    seq: int
    complete: bool
    at_s: float
    next_part: int = 0
    size: int = 0
    blocks: dict[Tier, array[int]] = field(default_factory=dict)

    def add(self, part: Mapping[Tier, array[int]], now_s: float) -> bool:
        """Add one part. Return False if the inventory has become larger than a reader holds."""
        self.next_part += 1
        self.at_s = now_s
        for tier, values in part.items():
            self.size += len(values)
            if self.size > MAX_DUMP_BLOCKS:
                return False
            self.blocks.setdefault(tier, array("Q")).extend(values)
        return True


@dataclass(slots=True)
class SourceState:
    """The reading position of one worker. `complete`: the index has all its blocks, not only those since a loss."""

    member: bool = False
    sends_events: bool = True
    epoch: int = NO_EPOCH
    previous: int = NO_EPOCH  # late messages of the epoch before are old
    n: int = -1
    seq: int = 0
    complete: bool = False
    wanted: bool = True  # the inventory is
    stranger_since_s: float = 0.0
    gathering: InventoryParts | None = None
    next_ask_s: float = 0.0
    asks: int = 0


def parts_of(index: PrefixIndex, worker: str, tier: Tier) -> Iterator[bytes]:
    """Iterate over the blocks of a worker in one tier by parts, because all together take tens of milliseconds."""
    return index.iter_blocks(worker, tier, PART_BLOCKS)
