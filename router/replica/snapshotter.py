"""Making snapshots while events go on, and who does it.

One router of a pool holds the lease `snapshots.<pool>` and makes them.  A snapshot is taken worker
by worker, with a turn for everybody else in between; each worker's part is exact as of its own message, as
`headrace.router.replica.snapshot_format` explains.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Generator

import structlog

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.errors import SnapshotError, SnapshotForeign, UnknownWorker
from headrace.router.kv_events import metrics
from headrace.router.kv_events.inventory import WorkerSlice
from headrace.router.kv_events.reader import KvEventReader
from headrace.router.replica.settings import SnapshotSettings
from headrace.router.replica.snapshot_format import Source
from headrace.router.replica.snapshot_store import Pointer, SnapshotStore

log = structlog.get_logger(__name__)

LOOK_S = 0.5
BUSY_S = 0.001
TRIES = 5
REST_S = 0.002  # between two slices: the rest of the process gets at least as much time


async def take(feed: KvEventReader, *, rest_s: float) -> tuple[list[WorkerSlice], int]:
    """A slice of every worker, and the sequence behind which replay goes on. Raises SnapshotError when the feed began anew
    meanwhile."""
    seq, resets = feed.seq, feed.resets
    slices = []
    for worker in feed.workers():
        piece = await _slice(feed, worker, rest_s)
        if piece is not None:
            slices.append(piece)
            seq = min(seq, piece.seq)
        if feed.resets != resets:
            raise SnapshotError("the index began anew while it was written down")
    return slices, seq


async def _slice(feed: KvEventReader, worker: str, rest_s: float) -> WorkerSlice | None:
    for _ in range(TRIES):
        while feed.busy == worker:
            await asyncio.sleep(BUSY_S)
        try:
            return await _through(feed.slicing(worker), rest_s)
        except (RuntimeError, UnknownWorker) as error:
            log.info("snapshot.slice_again", worker=worker, error=str(error))
    raise SnapshotError(f"the blocks of {worker} did not hold still")


async def _through(work: Generator[None, None, WorkerSlice | None], rest_s: float) -> WorkerSlice | None:
    try:
        while True:
            started = time.perf_counter()
            try:
                next(work)
            except StopIteration as end:
                piece: WorkerSlice | None = end.value
                return piece
            finally:
                metrics.SLICE_S.observe(time.perf_counter() - started)
            await asyncio.sleep(rest_s)
    finally:
        work.close()


class Snapshotter:
    """Runs in every router; works in the one that leads."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        pool: str,
        feed: KvEventReader,
        *,
        router: str,
        block_size: int,
        settings: SnapshotSettings | None = None,
        ready: Callable[[], bool] = lambda: True,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings or SnapshotSettings()
        self.store = SnapshotStore(messaging, subjects, pool)
        self._feed = feed
        self._pool = pool
        self._block_size = block_size
        self._ready = ready
        self._wall = wall
        self._lease = LeaseKeeper(
            messaging,
            subjects.bucket("members"),
            f"snapshots.{pool}",
            f"{router} {secrets.token_hex(8)}".encode(),
            ttl_s=self.settings.lease_ttl_s,
            on_lapse=self._stand_down,
            on_gained=self._lead,
        )
        self._last: Pointer | None = None
        self._applied = 0  # events there were when the last one was made
        self._purged = 0
        self._since = 0.0
        self.rest_s = REST_S

    @property
    def leads(self) -> bool:
        return self._lease.held

    def _lead(self) -> None:
        self._last = None
        self._since = self._wall()
        metrics.LEADER.labels(self._pool).set(1)
        log.info("snapshots.leading", pool=self._pool)

    def _stand_down(self) -> None:
        metrics.LEADER.labels(self._pool).set(0)

    async def run(self) -> None:
        """Until cancelled; then the next router can lead at once."""
        while not self._ready():
            await asyncio.sleep(LOOK_S)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lease.run())
                tasks.create_task(self._work())
        finally:
            self._stand_down()

    async def release(self) -> None:
        """Give the leadership up, on the way out."""
        await self._lease.release()

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._lease.held or not self._ready():
                continue
            try:
                if await self._due():
                    await self.snapshot()
                await self.purge()
            except (JetStreamError, SnapshotError) as error:
                metrics.SNAPSHOTS.labels("failed").inc()
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
        events = self._feed.applied - self._applied
        age_s = self._wall() - (kept[0].at if kept else self._since)
        return events >= settings.every_events or (events > 0 and age_s >= settings.every_s) or age_s >= settings.refresh_s

    async def snapshot(self) -> Pointer:
        """Make one now. Raises JetStreamError, SnapshotError."""
        started = time.perf_counter()
        applied = self._feed.applied
        state = await self.store.state()
        if self._feed.created and state.created != self._feed.created:
            raise SnapshotForeign(f"the stream was made at {state.created}, the index is of the one of {self._feed.created}")
        if self._feed.seq >= state.last_of_subject:
            self._feed.advance(state.last_seq)  # all that lies behind our last event is of others
        source = Source(self._pool, self._block_size, self.store.stream, state.created)
        slices, seq = await take(self._feed, rest_s=self.rest_s)
        pointer = await self.store.save(
            source, slices, seq=seq, at=self._wall(), keep=self.settings.keep, leads=lambda: self._lease.held
        )
        self._last, self._applied = pointer, applied
        newest = pointer.kept[0]
        took_s = time.perf_counter() - started
        metrics.SNAPSHOTS.labels("stored").inc()
        metrics.SNAPSHOT_S.observe(took_s)
        metrics.SNAPSHOT_BYTES.labels(self._pool).set(newest.size)
        metrics.SNAPSHOT_SEQ.labels(self._pool).set(newest.seq)
        log.info(
            "snapshot.stored", pool=self._pool, seq=seq, blocks=newest.blocks, workers=len(slices), took_s=round(took_s, 3)
        )
        return pointer

    async def purge(self) -> int:
        """Remove what no kept snapshot needs any more, if it is time."""
        if self._last is None or not self._last.kept or self._last.kept[-1].seq == self._purged:
            return 0
        settings = self.settings
        oldest = self._last.kept[-1]
        if len(self._last.kept) < settings.keep or oldest.at > self._wall() - settings.purge_after_s or not self._lease.held:
            return 0
        removed = await self.store.purge(self._last, keep=settings.keep)
        self._purged = oldest.seq
        return removed
