"""The store of snapshots: objects in store `snapshots`, and one pointer per pool in bucket `state` that names the valid ones.

A snapshot exists from the moment the pointer names it, and the pointer changes by compare-and-set only.  So a crash after the
upload leaves an object that is never read; objects have a few fixed names, taken in turn, and the next snapshot writes over
it.  Two writers at once (a leader that does not know yet that it is none) may write to the same name: one of them loses at the
pointer, and should the other one's pointer name an object that was written over, its digest tells, and the older snapshot is
used.  That is why the stream is purged up to the oldest snapshot kept, not the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import UnsupportedVersion, WireError
from headrace.broker.messages import Record
from headrace.jetstream.errors import LeaseLost
from headrace.jetstream.ports import Messaging, StreamState
from headrace.jetstream.subjects import Subjects
from headrace.router.errors import SnapshotCorrupt
from headrace.router.kv_events import metrics
from headrace.router.kv_events.inventory import WorkerSlice
from headrace.router.replica.settings import KEEP
from headrace.router.replica.snapshot_format import Source
from headrace.router.replica.snapshot_format import encode as encode_snapshot

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
    """Stores the snapshots of one pool."""

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
        """Return the state of the stream, with the last event of this pool."""
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
        """Load a snapshot. Raises ObjectNotFound, ObjectCorrupt."""
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
        metrics.PURGED.inc(removed)
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
