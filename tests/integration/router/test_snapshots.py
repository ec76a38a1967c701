"""A router's index over a real server: restarts, snapshots, purges, inventories."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker.codec import decode, encode, pack_u64
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import KvDump, WorkerControl
from headrace.broker.messages.events import KvReset, KvStep
from headrace.broker.messages.members import WorkerMember
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.router.index.follower import KvFollower
from headrace.router.index.snapshot import Pointer, SnapshotStore, UnreadablePointer
from headrace.router.index.snapshotter import ReplicaDeps
from headrace.router.settings import SnapshotSettings
from tests.support.router.cache_oracle import OracleView, contents

POOL = "p"
EAGER = SnapshotSettings(every_events=10, every_s=0.1, purge_after_s=0.0, lease_ttl_s=2.0)
NEVER = SnapshotSettings(every_events=10**9, every_s=1e9, refresh_s=1e9)


class Worker:
    """Publishes what it holds, answers asks for its inventory."""

    def __init__(self, connection: Connection, subjects: Subjects, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.n = 0
        self.held: set[int] = set()
        self.asked = 0
        self._connection = connection
        self._subjects = subjects
        self._asks: asyncio.Queue[None] = asyncio.Queue(100)

    async def publish(self, message: KvStep | KvReset) -> None:
        data = encode(message)
        await self._connection.publish(
            self._subjects.kv(POOL, self.name), data, msg_id=f"{self.name}.{message.epoch}.{message.n}", timeout_s=10.0
        )

    async def step(self, *stored: int, removed: tuple[int, ...] = (), lost: bool = False) -> None:
        self.held = self.held - set(removed) | set(stored)
        message = KvStep(
            worker=self.name,
            epoch=self.epoch,
            n=self.n,
            stored={"device": pack_u64(stored)} if stored else {},
            removed={"device": pack_u64(removed)} if removed else {},
        )
        self.n += 1
        if not lost:
            await self.publish(message)

    async def join(self) -> None:
        member = WorkerMember(worker=self.name, pool=POOL, model="m", kv_events=True, epoch=self.epoch)
        bucket = self._connection.bucket(self._subjects.bucket("members"))
        await bucket.put(self._subjects.worker_key(POOL, self.name), encode(member))
        await self._connection.subscribe(self._subjects.control(self.name), self._on_control)

    def _on_control(self, message: Message) -> None:
        if isinstance(decode(WorkerControl, message.data), KvDump):  # type: ignore[arg-type]
            self.asked += 1
            self._asks.put_nowait(None)

    async def answer(self) -> None:
        """For ever."""
        while True:
            await self._asks.get()
            blocks, dump = sorted(self.held), self.n
            for part, some in enumerate((blocks[::2], blocks[1::2])):
                packed = {"device": pack_u64(some)} if some else {}
                message = KvReset(
                    worker=self.name, epoch=self.epoch, n=self.n, dump=dump, part=part, last=part == 1, blocks=packed
                )
                self.n += 1
                await self.publish(message)


class Router:
    def __init__(
        self, connection: Connection, subjects: Subjects, *, settings: SnapshotSettings = NEVER, members: Members | None = None
    ) -> None:
        self.view = OracleView()
        self.follower = KvFollower(
            ReplicaDeps(messaging=connection, subjects=subjects, pool=POOL, router="r", block_size=16, settings=settings),
            self.view,
            self.view.index,
            members=members,
        )

    def holds(self, *workers: Worker) -> bool:
        return self.follower.ready and contents(self.view.index) == {
            w.name: {"device": frozenset(w.held)} for w in workers if w.held
        }


@contextlib.asynccontextmanager
async def running(router: Router) -> AsyncIterator[Router]:
    task = asyncio.ensure_future(router.follower.run())
    try:
        yield router
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, JetStreamError):
            await task


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def pointer_of(connection: Connection, subjects: Subjects) -> Pointer | None:
    try:
        return (await SnapshotStore(connection, subjects, POOL).pointer())[0]
    except UnreadablePointer:
        return None


async def kept(connection: Connection, subjects: Subjects, seq: int, *, purged: bool = False) -> Pointer:
    """Once the newest snapshot is of `seq` or later; with `purged` once there are two and the stream was purged."""
    async with asyncio.timeout(20):
        while True:
            pointer = await pointer_of(connection, subjects)
            if pointer is not None and pointer.kept[0].seq >= seq:
                state = await connection.stream_state(subjects.stream("KV"))
                if not purged or (len(pointer.kept) == 2 and state.first_seq > pointer.kept[-1].seq):
                    return pointer
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_router_that_starts_again_has_what_it_had(connection: Connection, subjects: Subjects) -> None:
    a, b = Worker(connection, subjects, "a"), Worker(connection, subjects, "b")
    async with running(Router(connection, subjects, settings=EAGER)) as router:
        await a.step(1, 2, 3)
        await b.step(10, 11)
        await until(lambda: router.holds(a, b))
        await kept(connection, subjects, 2)
        await a.step(4, removed=(1,))
        await b.step(12)
        await until(lambda: router.holds(a, b))
        await kept(connection, subjects, 4, purged=True)
    await a.step(5)
    async with running(Router(connection, subjects)) as again:
        await until(lambda: again.holds(a, b))
        assert again.follower.restored is not None
        assert again.follower.restored.source == "snapshot"
        assert again.follower.restored.start_seq == 5
        await b.step(13)
        await until(lambda: again.holds(a, b))
        assert again.follower.lag == 0


async def test_a_reader_that_lost_events_is_repaired_through_the_stream(connection: Connection, subjects: Subjects) -> None:
    members = Members(connection, subjects, lease_ttl_s=4.0)
    watching = asyncio.ensure_future(members.run())
    a = Worker(connection, subjects, "a")
    await a.join()
    answering = asyncio.ensure_future(a.answer())
    asking, silent = Router(connection, subjects, members=members), Router(connection, subjects)
    async with running(asking), running(silent):
        await a.step(1, 2, 3)
        await until(lambda: asking.holds(a) and silent.holds(a))
        await a.step(4, removed=(1,), lost=True)
        await a.step(5)
        await until(lambda: asking.holds(a))
        await until(lambda: silent.holds(a))  # the other one asked, the answer is for all
        assert a.asked >= 1
    for task in (watching, answering):
        task.cancel()
    await asyncio.wait([watching, answering])


@pytest.mark.slow
async def test_a_restart_of_the_server_loses_nothing(own_server: EmbeddedServer, connect, subjects: Subjects) -> None:  # type: ignore[no-untyped-def]
    connection: Connection = await connect(own_server, topology=Topology(subjects))
    a = Worker(connection, subjects, "a")
    async with running(Router(connection, subjects, settings=EAGER)) as router:
        await a.step(1, 2)
        await until(lambda: router.holds(a))
        own_server.kill()
        own_server.start()
        await a.step(3, removed=(2,))
        await until(lambda: router.holds(a))
        pointer = await kept(connection, subjects, 2)
    assert pointer.kept[0].workers == {"a": (1, 1)}


@pytest.mark.slow
async def test_events_purged_unread_begin_the_index_anew(connection: Connection, subjects: Subjects) -> None:
    """A reader that stood still while the stream was purged, under a stream that other pools use too."""
    await connection.publish(subjects.kv("other", "x"), b"keeps the stream's first sequence at 1")
    a = Worker(connection, subjects, "a")
    leading, stalled = Router(connection, subjects, settings=EAGER), Router(connection, subjects)
    async with running(leading):
        await until(lambda: leading.follower.snapshotter.leads)
        async with running(stalled):
            await a.step(1, 2, 3)
            await until(lambda: leading.holds(a) and stalled.holds(a))
            feed = stalled.follower.reader
            receive, position = feed.receive, feed.seq
            feed.receive = lambda *_args: None  # type: ignore[method-assign, assignment]
            for block in (4, 5, 6):
                await a.step(block, removed=(block - 3,))  # read by it, but to no effect
                await kept(connection, subjects, position + block - 3)
            feed.receive = receive  # type: ignore[method-assign]
            feed.seq = position
            stalled.follower._doubtful = True  # as after a reconnect, or when the clock shows that it stood still
            await a.step(7)
            await until(lambda: stalled.holds(a))
            assert stalled.follower.restored is not None
            assert stalled.follower.restored.source == "snapshot"


@pytest.mark.slow
async def test_a_stream_made_anew_begins_the_index_anew(own_server: EmbeddedServer, connect, subjects: Subjects) -> None:  # type: ignore[no-untyped-def]
    topology = Topology(subjects)
    connection: Connection = await connect(own_server, topology=topology)
    a = Worker(connection, subjects, "a")
    async with running(Router(connection, subjects)) as router:
        await a.step(1, 2, 3)
        await until(lambda: router.holds(a))
        await connection.api.call(f"STREAM.DELETE.{subjects.stream('KV')}")
        spec = next(s for s in topology.streams() if s.name == subjects.stream("KV"))
        await connection.api.call(f"STREAM.CREATE.{spec.name}", spec.config())
        a.epoch, a.n, a.held = 2, 0, set()
        await a.step(50)
        await until(lambda: router.holds(a))


async def test_nonsense_in_the_stream_stops_nobody(connection: Connection, subjects: Subjects) -> None:
    a = Worker(connection, subjects, "a")
    async with running(Router(connection, subjects)) as router:
        await a.step(1)
        await connection.publish(subjects.kv(POOL, "a"), b"\xc1")
        await connection.publish(subjects.kv(POOL, "nobody"), encode({"v": 99}))
        await connection.publish(subjects.kv(POOL, "b"), encode(KvStep(worker="a", epoch=1, n=1)))
        await a.step(2)
        await until(lambda: router.view.index.held.get("a", {}).get("device") == {1, 2})  # type: ignore[call-overload]


@pytest.mark.slow
async def test_one_router_leads_and_another_takes_over(connection: Connection, connect, subjects: Subjects) -> None:  # type: ignore[no-untyped-def]
    second: Connection = await connect()
    one, two = Router(connection, subjects, settings=EAGER), Router(second, subjects, settings=EAGER)
    a = Worker(connection, subjects, "a")
    async with running(two):
        async with running(one):
            await a.step(1)
            await until(lambda: one.follower.snapshotter.leads or two.follower.snapshotter.leads)
            await kept(connection, subjects, 1)
            assert not (one.follower.snapshotter.leads and two.follower.snapshotter.leads)
        await until(lambda: two.follower.snapshotter.leads)
        await a.step(2)
        await kept(connection, subjects, 2)


@pytest.mark.parametrize("what", ["object", "pointer"])
@pytest.mark.slow
async def test_what_is_missing_is_made_up_for(connection: Connection, subjects: Subjects, what: str) -> None:
    a = Worker(connection, subjects, "a")
    async with running(Router(connection, subjects, settings=EAGER)) as router:
        await a.step(1, 2)
        await until(lambda: router.holds(a))
        pointer = await kept(connection, subjects, 1)
    if what == "object":
        await connection.objects(subjects.bucket("snapshots")).delete(pointer.kept[0].object)
    else:
        await connection.bucket(subjects.bucket("state")).put(f"snapshot.{POOL}", b"\xc1")
    async with running(Router(connection, subjects, settings=EAGER)) as again:
        await until(lambda: again.holds(a))
        assert again.follower.restored is not None
        assert again.follower.restored.source == "empty"
        await a.step(3)
        await kept(connection, subjects, 2)
