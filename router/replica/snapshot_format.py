"""The format of a snapshot: the blocks of every worker, up to a message of a stream.

    magic     8 bytes, b"HRKVSNAP"
    version   u32
    length    u32, of the header
    header    msgpack map, `Header`
    blocks    per worker and tier, in the order of the header: chain values, u64
    digest    16 bytes, xxh3_128 of everything before

All integers are little endian.  The blocks of a worker are as they were after the message `seq` of the stream, its own one: a
snapshot is taken worker by worker while events go on.  A reader that replays the stream from the smallest of them on and skips,
for each worker, messages that are not newer than its own, has exactly the index that a reader of the whole stream has, because
one worker's events change only that worker's blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from headrace.broker.codec import encode as pack
from headrace.broker.messages.base import Count, Place
from headrace.router.errors import SnapshotCorrupt, SnapshotForeign, SnapshotTooNew
from headrace.router.index.types import TIERS, Tier
from headrace.router.kv_events.inventory import Packed, WorkerSlice

MAGIC = b"HRKVSNAP"
VERSION = 1

_FIXED = struct.Struct("<8sII")
_DIGEST_BYTES = 16
_MAX_HEADER = 64 * 1024 * 1024


class Source(NamedTuple):
    """The source of a snapshot. `created`: the time at which the stream was made, as its server writes it."""

    pool: str
    block_size: int
    stream: str
    created: str


class WorkerEntry(msgspec.Struct, frozen=True):
    """A worker in the header. `blocks`: the number of values that follow, by tier."""

    worker: Place
    epoch: int
    previous: int  # the epoch before, -1 when there was none
    n: int
    seq: Count
    complete: bool
    blocks: dict[str, Count]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a snapshot. Replay goes on behind `seq`; `at` is Unix time."""

    pool: str
    block_size: int
    stream: str
    created: str
    seq: int
    at: float
    workers: list[WorkerEntry]

    @property
    def source(self) -> Source:
        return Source(self.pool, self.block_size, self.stream, self.created)

    @property
    def blocks(self) -> int:
        """Entries (block, worker, tier) in all."""
        return sum(sum(entry.blocks.values()) for entry in self.workers)


def encode(source: Source, slices: Sequence[WorkerSlice], *, seq: int, at: float) -> Iterator[Packed]:
    """Iterate over the pieces of a snapshot, in order. `seq` must not be above that of any slice, else ValueError."""
    entries = []
    for piece in slices:
        if piece.seq < seq:
            raise ValueError(f"the slice of {piece.worker} is of message {piece.seq}, the snapshot would be of {seq}")
        counts: dict[str, int] = {tier: len(piece.blocks[tier]) // 8 for tier in TIERS if tier in piece.blocks}
        entries.append(WorkerEntry(piece.worker, piece.epoch, piece.previous, piece.n, piece.seq, piece.complete, counts))
    header = pack(Header(**source._asdict(), seq=seq, at=at, workers=entries))
    digest = xxhash.xxh3_128()
    start = _FIXED.pack(MAGIC, VERSION, len(header)) + header
    digest.update(start)
    yield start
    for piece in slices:
        for tier in TIERS:
            if tier in piece.blocks:
                digest.update(piece.blocks[tier])
                yield piece.blocks[tier]
    yield digest.digest()


def read_header(data: bytes) -> tuple[Header, int]:
    """Return the header and the offset of the blocks. Raises SnapshotCorrupt, SnapshotTooNew."""
    if len(data) < _FIXED.size:
        raise SnapshotCorrupt(f"a snapshot of {len(data)} bytes is none")
    magic, version, length = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotCorrupt(f"it begins with {magic!r} where {MAGIC!r} should be")
    if version > VERSION:
        raise SnapshotTooNew(f"it is of version {version}; this program reads up to {VERSION}")
    end = _FIXED.size + length
    if length > _MAX_HEADER or end + _DIGEST_BYTES > len(data):
        raise SnapshotCorrupt(f"its header of {length} bytes does not fit into its {len(data)} bytes")
    try:
        return msgspec.msgpack.decode(memoryview(data)[_FIXED.size : end], type=Header), end
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotCorrupt(f"its header cannot be read: {error}") from None


def decode(data: bytes, source: Source) -> tuple[Header, list[WorkerSlice]]:
    """Read a snapshot. Blocks are views into `data`.

    Raises SnapshotCorrupt, SnapshotTooNew, and SnapshotForeign if it is not of `source`.
    """
    header, start = read_header(data)
    check_source(header.source, source)
    size = start + 8 * header.blocks + _DIGEST_BYTES
    if len(data) != size:
        raise SnapshotCorrupt(f"it has {len(data)} bytes, not the {size} that its header says")
    view = memoryview(data)
    if xxhash.xxh3_128_digest(view[:-_DIGEST_BYTES]) != view[-_DIGEST_BYTES:]:
        raise SnapshotCorrupt("it does not have the digest at its end")
    return header, list(_slices(header.workers, view, start))


def check_source(found: Source, wanted: Source) -> None:
    """Compare the sources. Raises SnapshotForeign naming the difference."""
    for name in Source._fields:
        have, want = getattr(found, name), getattr(wanted, name)
        if have != want:
            raise SnapshotForeign(f"its {name.replace('_', ' ')} is {have!r}, not {want!r}")


def _slices(entries: Iterable[WorkerEntry], view: memoryview, start: int) -> Iterator[WorkerSlice]:
    for entry in entries:
        blocks: dict[Tier, Packed] = {}
        for tier in TIERS:  # in the order in which they were written
            if tier in entry.blocks:
                end = start + 8 * entry.blocks[tier]
                blocks[tier] = view[start:end]
                start = end
        yield WorkerSlice(entry.worker, entry.epoch, entry.previous, entry.n, entry.seq, entry.complete, blocks)
