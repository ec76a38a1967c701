"""Snapshots of an index: their format, their store, and the start of an index from one.

The format of a snapshot: the blocks of every worker, up to a message of a stream.

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

import asyncio
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import structlog
import xxhash

from headrace.broker.codec import decode, encode
from headrace.broker.codec import encode as pack
from headrace.broker.errors import UnsupportedVersion, WireError
from headrace.broker.messages.requests import Count, Place, Record
from headrace.jetstream.errors import LeaseLost, ObjectCorrupt, ObjectNotFound, TopologyError
from headrace.jetstream.ports import Messaging, StreamState
from headrace.jetstream.subjects import Subjects
from headrace.router.errors import SnapshotCorrupt, SnapshotError, SnapshotForeign, SnapshotTooNew
from headrace.router.index import inventory
from headrace.router.index.inventory import Packed, WorkerSlice
from headrace.router.index.reader import KvEventReader, run_sliced
from headrace.router.index.types import TIERS, Tier
from headrace.router.settings import KEEP

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
        return sum(sum(entry.blocks.values()) for entry in self.workers)


def encode_snapshot(source: Source, slices: Sequence[WorkerSlice], *, seq: int, at: float) -> Iterator[Packed]:
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


def decode_snapshot(data: bytes, source: Source) -> tuple[Header, list[WorkerSlice]]:
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


# The store of snapshots: objects in store `snapshots`, and one pointer per pool in bucket `state` that names the valid ones.
#
# A snapshot exists from the moment the pointer names it, and the pointer changes by compare-and-set only. So a crash after
# the upload leaves an object that is never read; objects have a few fixed names, taken in turn, and the next snapshot writes
# over it. Two writers at once (a leader that does not know yet that it is none) may write to the same name: one of them loses
# at the pointer, and should the other one's pointer name an object that was written over, its digest tells, and the older
# snapshot is used. That is why the stream is purged up to the oldest snapshot kept, not the newest.

log = structlog.get_logger(__name__)

_COPY_BYTES = 1024 * 1024


class Kept(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A snapshot in the pointer. `workers`: (epoch, n) of the last message of each worker that is in it."""

    object: str
    digest: str  # SHA-256, hex
    size: int
    seq: int
    at: float
    created: str  # of the stream
    blocks: int = 0
    workers: dict[str, tuple[int, int]] = {}


class Pointer(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The pointer: bucket `state`, key `snapshot.<pool>`. `kept`: newest first."""

    pool: str
    stream: str
    block_size: int
    kept: list[Kept] = []


class SnapshotStore:
    def __init__(self, messaging: Messaging, subjects: Subjects, pool: str) -> None:
        self.pool = pool
        self.stream = subjects.stream("KV")
        self.subject = subjects.kv_filter(pool)
        self.key = f"snapshot.{pool}"
        self.unusable: set[str] = set()  # digests of snapshots that could not be read: not worth keeping
        self._messaging = messaging
        self._bucket = messaging.bucket(subjects.bucket("state"))
        self._objects = messaging.objects(subjects.bucket("snapshots"))

    async def state(self) -> StreamState:
        return await self._messaging.stream_state(self.stream, subject=self.subject)

    async def pointer(self) -> tuple[Pointer | None, int]:
        """Return the pointer and its revision, which is 0 if there is none. Raises UnreadablePointer."""
        entry = await self._bucket.get(self.key)
        if entry is None:
            return None, 0
        try:
            return decode(Pointer, entry.value), entry.revision
        except WireError as error:
            raise UnreadablePointer(
                f"the pointer {self.key} cannot be read: {error}",
                revision=entry.revision,
                newer=isinstance(error, UnsupportedVersion),
            ) from None

    async def load(self, kept: Kept) -> bytes:
        return await self._objects.get(kept.object)

    async def save(
        self,
        source: Source,
        slices: Sequence[WorkerSlice],
        *,
        seq: int,
        at: float,
        keep: int = KEEP,
        leads: Callable[[], bool] = lambda: True,
    ) -> Pointer:
        """Upload a snapshot, then point to it.

        Raises LeaseLost if `leads` says no in between, RevisionConflict if another writer was faster.
        """
        old, revision = await self.pointer_to_replace()
        before = [kept for kept in old.kept if kept.created == source.created] if old is not None else []
        before = [kept for kept in before if kept.digest not in self.unusable]
        name = _free_name(self.pool, {kept.object for kept in before}, keep)
        data = bytearray()
        for piece in encode_snapshot(source, slices, seq=seq, at=at):
            view = memoryview(piece)
            for start in range(0, len(view), _COPY_BYTES):
                data += view[start : start + _COPY_BYTES]
                await asyncio.sleep(0)
        digest = await self._objects.put(name, data)
        if not leads():
            raise LeaseLost("another router makes the snapshots now")
        new = Kept(
            object=name,
            digest=digest,
            size=len(data),
            seq=seq,
            at=at,
            created=source.created,
            blocks=sum(sum(map(len, piece.blocks.values())) for piece in slices) // 8,
            workers={piece.worker: (piece.epoch, piece.n) for piece in slices},
        )
        kept = [new, *(one for one in before if one.seq <= seq)][:keep]
        pointer = Pointer(pool=self.pool, stream=self.stream, block_size=source.block_size, kept=kept)
        if revision:
            await self._bucket.update(self.key, encode(pointer), revision=revision)
        else:
            await self._bucket.create(self.key, encode(pointer))
        return pointer

    async def purge(self, pointer: Pointer, *, keep: int = KEEP, before_s: float = float("inf")) -> int:
        """Remove the events that are in the oldest snapshot kept, and return their number.

        There must be `keep` snapshots, the oldest made before `before_s`; otherwise nothing is removed.
        """
        if len(pointer.kept) < keep:
            return 0
        oldest = pointer.kept[-1]
        if oldest.at > before_s:
            return 0
        state = await self._messaging.stream_state(self.stream)
        if state.created != oldest.created or oldest.seq < state.first_seq:
            return 0
        removed = await self._messaging.purge_stream(self.stream, subject=self.subject, up_to_seq=oldest.seq)
        inventory.PURGED.inc(removed)
        return removed

    async def pointer_to_replace(self) -> tuple[Pointer | None, int]:
        """Return the pointer and its revision; a damaged one counts as none and will be written over.

        Raises UnreadablePointer for a pointer of a newer version: its writers know better.
        """
        try:
            return await self.pointer()
        except UnreadablePointer as error:
            if error.newer:
                raise
            log.warning("snapshot.pointer_unreadable", pool=self.pool, error=str(error))
            return None, error.revision


class UnreadablePointer(SnapshotCorrupt):
    """The pointer is damaged, or of a newer version."""

    def __init__(self, message: str, *, revision: int, newer: bool) -> None:
        super().__init__(message)
        self.revision = revision
        self.newer = newer


def _free_name(pool: str, taken: set[str], keep: int) -> str:
    return next(name for n in range(keep + 1) if (name := f"kv.{pool}.{n}") not in taken)


# The start of an index: it is loaded from a snapshot, and the replay of the stream begins behind that.
#
# A snapshot that cannot be used is logged and counted, and the next older one is taken. Without any, the index begins empty,
# reads the events that the stream still has, and every worker of which something is missing is asked for its inventory.

_HASH_BYTES = 1024 * 1024


class SnapshotTrimmed(SnapshotError):
    """The stream no longer has the events behind the snapshot."""


class Restored(NamedTuple):
    """The start of an index: replay goes on from `start_seq`, and has caught up when everything up to `target` is applied."""

    source: Literal["snapshot", "older", "empty"]
    start_seq: int
    target: int
    created: str
    blocks: int = 0


async def restore(reader: KvEventReader, store: SnapshotStore, *, block_size: int, at_most: int = 0) -> Restored:
    """Load the newest usable snapshot into an empty reader. `at_most`: only of snapshots up to this sequence (0: of any).

    Raises JetStreamError if NATS cannot be reached: try again.
    """
    state = await store.state()
    source = Source(store.pool, block_size, store.stream, state.created)
    reader.created = state.created
    pointer = await _pointer(store)
    loop = asyncio.get_running_loop()
    for number, kept in enumerate(pointer.kept if pointer is not None else ()):
        if at_most and kept.seq > at_most:
            continue
        try:
            header, slices = await _read(store, kept, source, state)
        except (SnapshotError, ObjectNotFound, ObjectCorrupt, TopologyError) as error:
            reason = reason_of(error)
            inventory.UNUSABLE.labels(reason).inc()
            store.unusable.add(kept.digest)
            log.warning("snapshot.unusable", pool=store.pool, object=kept.object, seq=kept.seq, reason=reason, error=str(error))
            continue
        for piece in slices:
            await run_sliced(reader.load(piece, loop.time()))
        reader.advance(header.seq)
        return Restored(
            "snapshot" if number == 0 else "older", header.seq + 1, state.last_of_subject, state.created, header.blocks
        )
    return Restored("empty", state.first_seq, state.last_of_subject, state.created)


def reason_of(error: Exception) -> str:
    if isinstance(error, ObjectNotFound | TopologyError):
        return "missing"
    labels: tuple[tuple[type[Exception], str], ...] = (
        (SnapshotTooNew, "version"),
        (SnapshotForeign, "foreign"),
        (SnapshotTrimmed, "trimmed"),
    )
    return next((label for kind, label in labels if isinstance(error, kind)), "corrupt")


async def _pointer(store: SnapshotStore) -> Pointer | None:
    try:
        pointer, _revision = await store.pointer()
    except UnreadablePointer as error:
        inventory.UNUSABLE.labels("pointer").inc()
        log.warning("snapshot.pointer_unreadable", pool=store.pool, error=str(error))
        return None
    return pointer


async def _read(store: SnapshotStore, kept: Kept, source: Source, state: StreamState) -> tuple[Header, list[WorkerSlice]]:
    """Load and check one snapshot. Raises SnapshotError, ObjectNotFound, ObjectCorrupt, TopologyError."""
    check_source(source._replace(created=kept.created), source)
    if kept.seq + 1 < state.first_seq:
        raise SnapshotTrimmed(f"the stream begins with {state.first_seq}, it ends with {kept.seq}")
    if kept.seq > state.last_seq:
        raise SnapshotForeign(f"it ends with {kept.seq}, the stream has only {state.last_seq}: it was restored from older data")
    data = await store.load(kept)
    digest = hashlib.sha256()
    view = memoryview(data)
    for start in range(0, len(data), _HASH_BYTES):
        digest.update(view[start : start + _HASH_BYTES])
        await asyncio.sleep(0)
    if digest.hexdigest() != kept.digest:
        raise SnapshotCorrupt(f"its digest is {digest.hexdigest()}, the pointer says {kept.digest}")
    header, slices = decode_snapshot(data, source)
    if header.seq != kept.seq:
        raise SnapshotCorrupt(f"it is of message {header.seq}, the pointer says {kept.seq}")
    return header, slices
