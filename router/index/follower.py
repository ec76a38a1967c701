"""The follower of one pool's cache events, from the last snapshot on: it keeps the index of a router current.

Every router reads every event for itself; there is no consumer to share.  A reader that missed events, because they were
removed from the stream before it read them (it stood still for minutes, an operator purged), begins again from a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import KvDump
from headrace.broker.places import places_of, worker_of
from headrace.jetstream.errors import JetStreamError, StreamTrimmed
from headrace.jetstream.ports import Follow
from headrace.router.index import inventory
from headrace.router.index.reader import KvEventReader, run_sliced
from headrace.router.index.snapshot import Restored, UnreadablePointer, restore
from headrace.router.index.snapshotter import ReplicaDeps, Snapshotter
from headrace.router.index.types import CacheView, PrefixIndex

log = structlog.get_logger(__name__)

TICK_S = 0.25
BUSY_S = 0.001
SHARE_S = 0.005  # events are applied for at most this long before the rest of the process gets its turn
STOOD_STILL_S = 5.0
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
MEMBERS_WAIT_S = 30.0
RELEASE_S = 1.0


class KvFollower:
    """Keeps `view` (and `index` inside it) current, and makes the pool's snapshots while it leads.

    It adds workers to the view with their first event and drops those that `members` no longer has. Without `members` every
    worker stays.
    """

    def __init__(
        self,
        deps: ReplicaDeps,
        view: CacheView,
        index: PrefixIndex,
        *,
        members: Members | None = None,
    ) -> None:
        self.pool = deps.pool
        self.reader = KvEventReader(view, index, pool=deps.pool)
        self.snapshotter = Snapshotter(deps, self.reader, ready=lambda: self.ready)
        self.restored: Restored | None = None
        self.ready_after_s = 0.0
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._members = members
        self._block_size = deps.block_size
        self._store = self.snapshotter.store
        self._put: set[str] = set()
        self._ready = False
        self._lag = 0
        self._alive_s = 0.0
        self._doubtful = False  # events may have been removed unread
        self._loop = asyncio.get_running_loop()
        inventory.POSITION.labels(self.pool).set_function(lambda: self.reader.seq)

    @property
    def ready(self) -> bool:
        """The index has caught up with the end that the stream had at the start."""
        return self._ready

    @property
    def lag(self) -> int:
        return self._lag

    async def run(self) -> None:
        forget = self._messaging.on_reconnect(self._on_reconnect)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._tick())
                tasks.create_task(self.snapshotter.run())
                if self._members is not None:
                    tasks.create_task(self._list_members(self._members))
        finally:
            forget()
            self._ready = False
            await self.release()

    async def release(self) -> None:
        """Let another router make the snapshots at once. `run` does so at its end, too."""
        if self._messaging.connected:
            with contextlib.suppress(TimeoutError, JetStreamError):
                async with asyncio.timeout(RELEASE_S):
                    await self.snapshotter.release()

    async def _follow(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            started = self._loop.time()
            try:
                begun = self.restored = await restore(self.reader, self._store, block_size=self._block_size)
            except JetStreamError as error:
                log.warning("index.not_restored", pool=self.pool, error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
            else:
                pause_s = RETRY_FIRST_S
                inventory.RESTORES.labels(begun.source).inc()
                log.info("index.restored", pool=self.pool, source=begun.source, blocks=begun.blocks, next_seq=begun.start_seq)
                await self._read_on(begun, started)
            self._ready = False
            self.reader.reset(self._loop.time())

    async def _read_on(self, begun: Restored, started: float) -> None:
        follow = self._messaging.follow(self._store.stream, self._store.subject, start_seq=begun.start_seq)
        self._doubtful = False
        self._alive_s = self._loop.time()
        try:
            while True:
                if not self._ready and self.reader.seq >= begun.target:
                    self._ready = True
                    self.ready_after_s = self._loop.time() - started
                    inventory.RESTORE_S.observe(self.ready_after_s)
                    log.info("index.ready", pool=self.pool, after_s=round(self.ready_after_s, 3), seq=self.reader.seq)
                await self._take_batch(follow)
        except StreamTrimmed as error:
            inventory.TRIMMED.inc()
            log.warning("kv.trimmed", pool=self.pool, error=str(error))
        finally:
            await follow.close()

    async def _take_batch(self, follow: Follow) -> None:
        batch = await follow.next()
        now = self._loop.time()
        if self._doubtful or now - self._alive_s > STOOD_STILL_S:
            await self._check_not_purged()
            now = self._loop.time()
        waiting = len(batch.messages)
        until = now + SHARE_S
        for message in batch.messages:
            self._lag = batch.pending + waiting
            waiting -= 1
            worker = message.subject.rpartition(".")[2]
            while self.reader.reading == worker:
                await asyncio.sleep(BUSY_S)
                now = self._loop.time()
            work = self.reader.receive(worker, message.seq, message.data, now)
            if work is not None:
                await run_sliced(work)
            now = self._loop.time()
            if now >= until:
                await asyncio.sleep(0)
                now = self._loop.time()
                until = now + SHARE_S
        self._lag = batch.pending
        self.reader.advance(batch.position)
        self._alive_s = now

    async def _check_not_purged(self) -> None:
        """Find out, after the process or the connection stood still, if unread events were purged. Raises StreamTrimmed.

        Where other pools use the stream too, its first message does not tell.  The pointer does: only events that are in the
        oldest snapshot are ever purged.
        """
        self._doubtful = False
        try:
            pointer, _revision = await self._store.pointer()
        except UnreadablePointer:
            return
        except JetStreamError:
            self._doubtful = True
            return
        if pointer is None or not pointer.kept:
            return
        oldest = pointer.kept[-1]
        if oldest.created == self.reader.created and oldest.seq > self.reader.seq:
            raise StreamTrimmed(
                f"events up to {oldest.seq} may have been purged, {self.reader.seq} is the last one read",
                wanted=self.reader.seq + 1,
            )

    async def _on_reconnect(self) -> None:
        self._doubtful = True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            if now - self._alive_s <= STOOD_STILL_S:
                self._alive_s = now
            self._sync_members(now)
            self.reader.expire(now)
            if self._ready:
                for worker in self.reader.sources.asks(now):
                    log.info("kv.inventory_wanted", pool=self.pool, worker=worker)
                    self._messaging.send(self._subjects.control(worker_of(worker)), encode(KvDump()))

    def _sync_members(self, now: float) -> None:
        if self._members is None:
            return
        live = places_of(self._members.workers(self.pool))
        for worker in self._put - live.keys():
            self._put.discard(worker)
            self.reader.sources.remove_worker(worker, now)
        for worker, member in live.items():
            if worker not in self._put:
                self._put.add(worker)
                self.reader.sources.put_worker(worker, now, sends_events=member.kv_events)

    async def _list_members(self, members: Members) -> None:
        while True:
            try:
                await members.ready(MEMBERS_WAIT_S)
            except JetStreamError as error:
                log.warning("index.waits_for_members", pool=self.pool, error=str(error))
                continue
            now = self._loop.time()
            self._sync_members(now)
            self.reader.sources.members_listed(now)
            return
