"""The start of an index: it is loaded from a snapshot, and the replay of the stream begins behind that.

A snapshot that cannot be used is logged and counted, and the next older one is taken.  Without any, the index begins empty,
reads the events that the stream still has, and every worker of which something is missing is asked for its inventory.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Literal, NamedTuple

import structlog

from headrace.jetstream.errors import ObjectCorrupt, ObjectNotFound, TopologyError
from headrace.jetstream.ports import StreamState
from headrace.router.errors import SnapshotCorrupt, SnapshotError, SnapshotForeign, SnapshotTooNew
from headrace.router.kv_events import metrics
from headrace.router.kv_events.inventory import WorkerSlice
from headrace.router.kv_events.reader import KvEventReader
from headrace.router.kv_events.sliced_work import run_sliced
from headrace.router.replica.snapshot_format import Header, Source, check_source, decode
from headrace.router.replica.snapshot_store import Kept, Pointer, SnapshotStore, UnreadablePointer

log = structlog.get_logger(__name__)

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
            metrics.UNUSABLE.labels(reason).inc()
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
    """Return the metric label of a snapshot that cannot be used."""
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
        metrics.UNUSABLE.labels("pointer").inc()
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
    header, slices = decode(data, source)
    if header.seq != kept.seq:
        raise SnapshotCorrupt(f"it is of message {header.seq}, the pointer says {kept.seq}")
    return header, slices
