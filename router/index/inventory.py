"""Records of a reader: one worker's reading position, its inventory under way, and its part of a snapshot."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from headrace.base.metrics import Counter, Gauge, Histogram
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


# Prometheus metrics of the index and its replica: cache events, snapshots, restarts.

EVENTS = Counter("headrace_router_kv_events_total", "Cache events applied to the index", ["kind"])
BLOCKS = Counter("headrace_router_kv_blocks_total", "Blocks in cache events applied", ["change"])
events, blocks = cache(EVENTS.labels), cache(BLOCKS.labels)
REFUSED = Counter("headrace_router_kv_refused_total", "Cache events that could not be used", ["reason"])
REPEATED = Counter("headrace_router_kv_repeated_total", "Cache events that were known already", ["why"])
LOST = Counter("headrace_router_kv_lost_total", "Times a worker's blocks were dropped because events are missing", ["why"])
DUMPS = Counter("headrace_router_kv_inventories_total", "Inventories of workers by what became of them", ["outcome"])
ASKS = Counter("headrace_router_kv_inventory_asks_total", "Times a worker was asked for its inventory")
INCOMPLETE = Gauge("headrace_router_kv_incomplete_workers", "Workers whose inventory is wanted", ["pool"])
STRANGERS = Gauge("headrace_router_kv_strangers", "Senders of cache events that are no members", ["pool"])
POSITION = Gauge("headrace_router_kv_position", "Sequence of the KV stream up to which the index has everything", ["pool"])
TRIMMED = Counter("headrace_router_kv_trimmed_total", "Times events were removed from the stream before they were read")

LEADER = Gauge("headrace_router_snapshot_leader", "1 while this router makes the snapshots of the pool", ["pool"])
SNAPSHOTS = Counter("headrace_router_snapshots_total", "Snapshots by what became of them", ["outcome"])
SNAPSHOT_S = Histogram(
    "headrace_router_snapshot_seconds",
    "Time to make and store a snapshot",
    buckets=(0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
SLICE_S = Histogram(
    "headrace_router_snapshot_slice_seconds",
    "Time that one slice of a snapshot kept everything else waiting",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
SNAPSHOT_BYTES = Gauge("headrace_router_snapshot_bytes", "Size of the last snapshot made", ["pool"])
SNAPSHOT_SEQ = Gauge("headrace_router_snapshot_seq", "Stream sequence of the last snapshot made", ["pool"])
PURGED = Counter("headrace_router_kv_purged_total", "Cache events removed from the stream behind a snapshot")
RESTORES = Counter("headrace_router_restores_total", "Starts of the index by where it came from", ["source"])
UNUSABLE = Counter("headrace_router_snapshots_unusable_total", "Snapshots that could not be used", ["reason"])
RESTORE_S = Histogram(
    "headrace_router_restore_seconds",
    "Time until the index was ready",
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
