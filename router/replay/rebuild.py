"""Rebuilds the index as of some message of the stream, from the last snapshot before it and the events up to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.errors import RouterError
from headrace.router.index.view import Caches
from headrace.router.kv_events.reader import KvEventReader
from headrace.router.kv_events.sliced_work import run_sliced
from headrace.router.replica.restore import restore
from headrace.router.replica.snapshot_store import SnapshotStore, UnreadablePointer

log = structlog.get_logger(__name__)

READ_TIMEOUT_S = 30.0


class NotKept(RouterError):
    """The stream no longer has that part, or not yet."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An index rebuilt from `source`. The last event applied has `seq` and was stored `at` (Unix time; 0: no event was read).

    `first_seq` and `last_seq` are those of the stream.
    """

    reader: KvEventReader
    caches: Caches
    seq: int
    at: float
    source: str
    replayed: int
    first_seq: int
    last_seq: int


async def rebuild(
    messaging: Messaging, subjects: Subjects, pool: str, *, at_seq: int = 0, before_s: float = 0.0, caches: Caches | None = None
) -> Rebuilt:
    """Rebuild up to message `at_seq`, or up to the last one stored before the Unix time `before_s`; 0 and 0: up to now.

    Raises NotKept, JetStreamError.
    """
    store = SnapshotStore(messaging, subjects, pool)
    state = await store.state()
    if at_seq and not state.first_seq - 1 <= at_seq <= state.last_seq:
        raise NotKept(f"message {at_seq} is not there: {store.stream} has {state.first_seq} to {state.last_seq}")
    caches = caches or Caches()
    reader = KvEventReader(caches, caches.index, pool=pool)
    until = at_seq or state.last_seq
    begun = await restore(
        reader, store, block_size=await _block_size(store), at_most=await _latest(store, until, before_s, state.first_seq)
    )
    seq, at, replayed = begun.start_seq - 1, 0.0, 0
    end = min(until, state.last_of_subject)
    follow = messaging.follow(store.stream, store.subject, start_seq=begun.start_seq)
    loop = asyncio.get_running_loop()
    try:
        while follow.position < end:
            async with asyncio.timeout(READ_TIMEOUT_S):
                batch = await follow.next()
            for message in batch.messages:
                if message.seq > until or (before_s and message.at >= before_s):
                    end = 0
                    break
                work = reader.receive(message.subject.rpartition(".")[2], message.seq, message.data, loop.time())
                if work is not None:
                    await run_sliced(work)
                seq, at, replayed = message.seq, message.at, replayed + 1
            await asyncio.sleep(0)
    except TimeoutError:
        raise JetStreamError(f"{store.stream} could not be read within {READ_TIMEOUT_S:g} s") from None
    finally:
        await follow.close()
    return Rebuilt(reader, caches, seq, at, begun.source, replayed, state.first_seq, state.last_seq)


async def _block_size(store: SnapshotStore) -> int:
    """Return the block size of the snapshots, whichever it is: a look back uses them as they are."""
    try:
        pointer, _revision = await store.pointer()
    except UnreadablePointer:
        return 0
    return pointer.block_size if pointer is not None else 0


async def _latest(store: SnapshotStore, until: int, before_s: float, first_seq: int) -> int:
    """Return the sequence up to which a snapshot is of use."""
    if not before_s:
        return until
    try:
        pointer, _revision = await store.pointer()
    except UnreadablePointer:
        return until
    usable = [kept.seq for kept in pointer.kept if kept.at <= before_s] if pointer is not None else []
    return min(until, max(usable, default=first_seq - 1)) or 1
