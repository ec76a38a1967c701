"""Snapshots of one pool's index, written by the one router that leads."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import structlog

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.errors import SnapshotError, SnapshotForeign, UnknownWorker
from headrace.router.index import inventory
from headrace.router.index.inventory import WorkerSlice
from headrace.router.index.reader import KvEventReader
from headrace.router.index.snapshot import Pointer, SnapshotStore, Source
from headrace.router.settings import SnapshotSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDeps:
    """Dependencies of one pool's replica in one router. `block_size` is in tokens; `wall` returns Unix time."""

    messaging: Messaging
    subjects: Subjects
    pool: str
    router: str
    block_size: int
    settings: SnapshotSettings = field(default_factory=SnapshotSettings)
    wall: Callable[[], float] = time.time


# The snapshotter: it writes the index down while events go on, in the one router of a pool that leads.
#
# That router holds the lease `snapshots.<pool>`. A snapshot is taken worker by worker, with a turn for the rest of the
# process in between; each worker's part is exact as of its own message, as `headrace.router.index.snapshot`
# explains.

log = structlog.get_logger(__name__)

CHECK_S = 0.5
BUSY_S = 0.001
TRIES = 5
REST_S = 0.002  # pause between two slices: the rest of the process gets at least as much time


async def take_slices(reader: KvEventReader, *, rest_s: float) -> tuple[list[WorkerSlice], int]:
    """Return a slice of every worker, and the sequence behind which replay goes on.

    Raises SnapshotError if the reader began anew meanwhile.
    """
    seq, resets = reader.seq, reader.resets
    slices = []
    for worker in reader.sources.workers():
        piece = await _slice(reader, worker, rest_s)
        if piece is not None:
            slices.append(piece)
            seq = min(seq, piece.seq)
        if reader.resets != resets:
            raise SnapshotError("the index began anew while it was written down")
    return slices, seq


async def _slice(reader: KvEventReader, worker: str, rest_s: float) -> WorkerSlice | None:
    for _ in range(TRIES):
        while reader.busy == worker:
            await asyncio.sleep(BUSY_S)
        try:
            return await _run_slicing(reader.slicing(worker), rest_s)
        except (RuntimeError, UnknownWorker) as error:
            log.info("snapshot.slice_again", worker=worker, error=str(error))
    raise SnapshotError(f"the blocks of {worker} did not hold still")


async def _run_slicing(work: Generator[None, None, WorkerSlice | None], rest_s: float) -> WorkerSlice | None:
    try:
        while True:
            started = time.perf_counter()
            try:
                next(work)
            except StopIteration as end:
                piece: WorkerSlice | None = end.value
                return piece
            finally:
                inventory.SLICE_S.observe(time.perf_counter() - started)
            await asyncio.sleep(rest_s)
    finally:
        work.close()


class Snapshotter:
    """Runs in every router, and makes snapshots in the one that leads."""

    def __init__(
        self,
        deps: ReplicaDeps,
        reader: KvEventReader,
        *,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.settings = deps.settings
        self.store = SnapshotStore(deps.messaging, deps.subjects, deps.pool)
        self._reader = reader
        self._pool = deps.pool
        self._block_size = deps.block_size
        self._ready = ready
        self._wall = deps.wall
        self._lease = LeaseKeeper(
            deps.messaging,
            deps.subjects.bucket("members"),
            f"snapshots.{deps.pool}",
            f"{deps.router} {secrets.token_hex(8)}".encode(),
            ttl_s=self.settings.lease_ttl_s,
            on_change=lambda held: self._begin_to_lead() if held else self._stop_leading(),
            contested=True,
        )
        self._last: Pointer | None = None
        self._applied = 0  # events there were when the last one was made
        self._purged = 0
        self._since = 0.0
        self.rest_s = REST_S

    @property
    def leads(self) -> bool:
        return self._lease.held

    def _begin_to_lead(self) -> None:
        self._last = None
        self._since = self._wall()
        inventory.LEADER.labels(self._pool).set(1)
        log.info("snapshots.leading", pool=self._pool)

    def _stop_leading(self) -> None:
        inventory.LEADER.labels(self._pool).set(0)

    async def run(self) -> None:
        """Lead when possible and make the snapshots then, until cancelled; then the next router can lead at once."""
        while not self._ready():
            await asyncio.sleep(CHECK_S)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lease.run())
                tasks.create_task(self._work())
        finally:
            self._stop_leading()

    async def release(self) -> None:
        await self._lease.release()

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if not self._lease.held or not self._ready():
                continue
            try:
                if await self._due():
                    await self.snapshot()
                await self.purge()
            except (JetStreamError, SnapshotError) as error:
                inventory.SNAPSHOTS.labels("failed").inc()
                log.warning("snapshot.failed", pool=self._pool, error=str(error))
                self._last = None
                await asyncio.sleep(self.settings.lease_ttl_s)

    async def _due(self) -> bool:
        if self._last is None:
            self._last, _revision = await self.store.pointer_to_replace()
            self._purged = 0
            if self._last is None:
                self._last = Pointer(pool=self._pool, stream=self.store.stream, block_size=self._block_size)
                self._applied = 0
        kept, settings = self._last.kept, self.settings
        events = self._reader.applied - self._applied
        age_s = self._wall() - (kept[0].at if kept else self._since)
        return events >= settings.every_events or (events > 0 and age_s >= settings.every_s) or age_s >= settings.refresh_s

    async def snapshot(self) -> Pointer:
        """Make a snapshot now. Raises JetStreamError, SnapshotError."""
        started = time.perf_counter()
        applied = self._reader.applied
        state = await self.store.state()
        if self._reader.created and state.created != self._reader.created:
            raise SnapshotForeign(f"the stream was made at {state.created}, the index is of the one of {self._reader.created}")
        if self._reader.seq >= state.last_of_subject:
            self._reader.advance(state.last_seq)  # everything behind our last event is of other pools
        source = Source(self._pool, self._block_size, self.store.stream, state.created)
        slices, seq = await take_slices(self._reader, rest_s=self.rest_s)
        pointer = await self.store.save(
            source, slices, seq=seq, at=self._wall(), keep=self.settings.keep, leads=lambda: self._lease.held
        )
        self._last, self._applied = pointer, applied
        newest = pointer.kept[0]
        took_s = time.perf_counter() - started
        inventory.SNAPSHOTS.labels("stored").inc()
        inventory.SNAPSHOT_S.observe(took_s)
        inventory.SNAPSHOT_BYTES.labels(self._pool).set(newest.size)
        inventory.SNAPSHOT_SEQ.labels(self._pool).set(newest.seq)
        log.info(
            "snapshot.stored", pool=self._pool, seq=seq, blocks=newest.blocks, workers=len(slices), took_s=round(took_s, 3)
        )
        return pointer

    async def purge(self) -> int:
        if self._last is None or not self._last.kept or self._last.kept[-1].seq == self._purged:
            return 0
        settings = self.settings
        oldest = self._last.kept[-1]
        if len(self._last.kept) < settings.keep or oldest.at > self._wall() - settings.purge_after_s or not self._lease.held:
            return 0
        removed = await self.store.purge(self._last, keep=settings.keep)
        self._purged = oldest.seq
        return removed
