"""The index after a restart equals the index before it, block for block.

Random histories of events, with repetitions, gaps, engine restarts and inventories that break off, go to a router that makes
snapshots meanwhile, is killed at any step of that, and starts again.  What it then has is compared with a reader that has seen
every message and was never restarted.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages.events import KvReset, KvStep
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.router.index import inventory, reader
from headrace.router.index.reader import KvEventReader
from headrace.router.index.snapshot import SnapshotStore, restore
from headrace.router.index.snapshotter import ReplicaDeps, Snapshotter
from headrace.router.settings import SnapshotSettings
from tests.support.router.cache_oracle import OracleView, contents
from tests.support.router.snapshot_fakes import POOL, SUBJECTS, Crash, FakeNats

WORKERS = ("a", "b", "c")
BLOCK_SIZE = 16


class Leads:
    held = True


class Publisher:
    """One worker as it publishes: mostly well."""

    def __init__(self, worker: str, number: int) -> None:
        self.worker = worker
        self.epoch = 1000 * (number + 1)
        self.n = 0
        self.dump = 0
        self.last = b""
        self.held: set[int] = set()

    def messages(self, action: tuple[str, Any]) -> list[bytes]:
        kind, value = action
        match kind:
            case "step":
                stored, removed, cleared, tier = value
                self.held = (set() if cleared else self.held) - set(removed) | set(stored)
                return [self._number(KvStep, cleared=cleared, stored=_packed(tier, stored), removed=_packed(tier, removed))]
            case "dump":
                return self._parts(value)
            case "repeat":
                return [self.last] * value if self.last else []
            case "engine":
                self.epoch, self.n = self.epoch + 7, 0
                self.held = set(value)
                return [self._number(KvStep, stored=_packed("device", value))]
            case "lost":
                self.n += value
                return []
            case _:
                return [b"\xc1 no message"]

    def _parts(self, pieces: int) -> list[bytes]:
        """All of them, or (negative) all but the last."""
        self.dump += 1
        blocks = sorted(self.held)
        count = abs(pieces) + 1
        made = [
            self._number(KvReset, dump=self.dump, part=i, last=i == count - 1, blocks=_packed("device", blocks[i::count]))
            for i in range(count)
        ]
        return made if pieces >= 0 else made[:-1]

    def _number(self, kind: Any, **fields: Any) -> bytes:
        self.last = encode(kind(worker=self.worker, epoch=self.epoch, n=self.n, **fields))
        self.n += 1
        return self.last


def _packed(tier: str, blocks: Any) -> dict[str, bytes]:
    return {tier: pack_u64(blocks)} if blocks else {}


blocks = st.lists(st.integers(0, 30), max_size=6)
event_kinds = st.one_of(
    st.tuples(
        st.just("step"), st.tuples(blocks, blocks, st.sampled_from([False] * 9 + [True]), st.sampled_from(["device", "host"]))
    ),
    st.tuples(st.just("dump"), st.integers(-2, 3)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("engine"), blocks),
    st.tuples(st.just("lost"), st.integers(1, 3)),
    st.tuples(st.just("nonsense"), st.none()),
)
events = st.tuples(st.sampled_from(WORKERS), event_kinds)
snapshots = st.tuples(st.just("snapshot"), st.tuples(st.lists(events, max_size=6), st.one_of(st.none(), st.integers(0, 16))))
histories = st.lists(st.one_of(events, events, events, snapshots), max_size=30)


class World:
    """One router that lives and dies, and one reader that has seen everything."""

    def __init__(self) -> None:
        self.nats = FakeNats()
        self.publishers = {worker: Publisher(worker, number) for number, worker in enumerate(WORKERS)}
        self.reference = self._reader()
        self.live = self._reader()
        self.wall_s = 1000.0
        self.starts = 0
        self.started_from: list[str] = []

    @staticmethod
    def _reader() -> tuple[KvEventReader, OracleView]:
        view = OracleView()
        return KvEventReader(view, view.index, pool=POOL), view

    def publish(self, event: tuple[str, Any]) -> list[StoredMessage]:
        worker, action = event
        made = []
        for data in self.publishers[worker].messages(action):
            made.append(message := self.nats.append(SUBJECTS.kv(POOL, worker), data))
            read(self.reference[0], message)
        self.nats.append(SUBJECTS.kv("other", "x"), b"of another pool")
        return made

    async def play(self, history: list[tuple[str, Any]]) -> None:
        for action in history:
            if action[0] == "snapshot":
                await self.snapshot(*action[1])
            else:
                for message in self.publish(action):
                    read(self.live[0], message)
        await self.restart()
        await self.restart_from_the_older_one()

    async def snapshot(self, meanwhile: list[tuple[str, Any]], crash_at: int | None) -> bool:
        """Events go on while it is made. True when it came through."""
        self.wall_s += 60.0
        making = asyncio.ensure_future(self._snapshot(crash_at))
        for event in meanwhile:
            for message in self.publish(event):
                await read_in_turns(self.live[0], message)
        done = await making
        if not done:
            await self.restart()
        return done

    async def _snapshot(self, crash_at: int | None) -> bool:
        snapshotter = Snapshotter(
            ReplicaDeps(
                messaging=cast("Messaging", self.nats),
                subjects=SUBJECTS,
                pool=POOL,
                router="r",
                block_size=BLOCK_SIZE,
                settings=SnapshotSettings(purge_after_s=0.0),
                wall=lambda: self.wall_s,
            ),
            self.live[0],
        )
        snapshotter._lease = cast("Any", Leads())
        snapshotter.rest_s = 0.0
        self.nats.begin(crash_at)
        try:
            await snapshotter.snapshot()
            await snapshotter.purge()
        except Crash:
            return False
        finally:
            self.nats.begin(None)
        return True

    async def restart(self) -> None:
        self.starts += 1
        self.live = self._reader()
        feed, view = self.live
        begun = await restore(feed, SnapshotStore(cast("Messaging", self.nats), SUBJECTS, POOL), block_size=BLOCK_SIZE)
        self.started_from.append(begun.source)
        for message in self.nats.after(begun.start_seq - 1):
            read(feed, message)
        assert contents(view.index) == contents(self.reference[1].index)
        for worker in WORKERS:
            assert feed.sources.known(worker) == self.reference[0].sources.known(worker)
            assert feed.sources.complete(worker) == self.reference[0].sources.complete(worker)

    async def restart_from_the_older_one(self) -> None:
        store = SnapshotStore(cast("Messaging", self.nats), SUBJECTS, POOL)
        pointer, _revision = await store.pointer()
        if pointer is not None and len(pointer.kept) == 2:
            objects, newest = self.nats.stores["hr_snapshots"], pointer.kept[0].object
            whole, objects[newest] = objects[newest], objects[newest][:-3]
            await self.restart()
            assert self.started_from[-1] == "older"
            objects[newest] = whole


def read(feed: KvEventReader, message: StoredMessage) -> None:
    work = feed.receive(message.subject.rpartition(".")[2], message.seq, message.data, 0.0)
    for _ in work or ():
        pass


async def read_in_turns(feed: KvEventReader, message: StoredMessage) -> None:
    while feed.reading == message.subject.rpartition(".")[2]:
        await asyncio.sleep(0)
    work = feed.receive(message.subject.rpartition(".")[2], message.seq, message.data, 0.0)
    for _ in work or ():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that large changes are half done while a snapshot is taken."""
    monkeypatch.setattr(reader, "SLICE_BLOCKS", 3)
    monkeypatch.setattr(inventory, "PART_BLOCKS", 2)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories)
def test_the_index_after_a_restart_equals_the_index_before(history: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        await World().play(history)

    asyncio.run(run())


HISTORY: list[tuple[str, Any]] = [
    ("a", ("step", ([1, 2, 3, 4, 5], [], False, "device"))),
    ("b", ("step", ([1, 9], [], False, "host"))),
    ("snapshot", ([("a", ("step", ([6], [2], False, "device")))], None)),
    ("b", ("lost", 2)),
    ("a", ("engine", [7, 8])),
    ("b", ("step", ([10], [], False, "device"))),
    ("snapshot", ([("b", ("dump", 2))], None)),
    ("a", ("dump", -2)),
    ("a", ("repeat", 2)),
    ("c", ("step", ([1, 2, 3, 4, 5, 6, 7], [], False, "device"))),
]
MEANWHILE: list[tuple[str, Any]] = [
    ("a", ("step", ([11, 12, 13, 14], [7], False, "device"))),
    ("c", ("step", ([], [1, 2, 3, 4, 5], False, "device"))),
    ("b", ("engine", [20, 21, 22, 23])),
    ("a", ("dump", 3)),
]


async def test_a_crash_at_every_step_of_a_snapshot_costs_nothing() -> None:
    points = 0
    for crash_at in range(100):
        world = World()
        await world.play(HISTORY)
        world.started_from.clear()
        through = await world.snapshot(MEANWHILE, crash_at)
        points = max(points, crash_at)
        await world.play(HISTORY[3:])  # life goes on: the next snapshot works with what the crash has left
        assert world.started_from[0] in ("snapshot", "older")
        if through:
            break
    else:
        pytest.fail("it never came through")
    assert points >= 10


async def test_the_stream_is_purged_only_up_to_the_older_snapshot() -> None:
    world = World()
    await world.play(HISTORY[:-3])
    store = SnapshotStore(cast("Messaging", world.nats), SUBJECTS, POOL)
    pointer, _revision = await store.pointer()
    assert pointer is not None
    newest, older = pointer.kept
    assert older.seq < newest.seq
    left = [message.seq for message in world.nats.after(0)]
    assert min(left) > older.seq
    assert min(left) <= newest.seq
    assert len(world.nats.stores["hr_snapshots"]) == 2
    others = [m for m in world.nats.messages.values() if m.subject == SUBJECTS.kv("other", "x")]
    assert len(others) == len([a for a in HISTORY[:-3] if a[0] != "snapshot"]) + 2  # another pool's are not ours to purge


async def test_what_a_slice_has_is_skipped_by_its_sequence() -> None:
    """Two engine starts while the snapshot is taken: the messages of the first epoch come again in the replay, and neither
    the worker's epoch nor the one before tells that they are old."""
    world = World()
    for event in [("a", ("step", ([1], [], False, "device"))), ("c", ("step", ([2], [], False, "device")))]:
        for message in world.publish(event):
            read(world.live[0], message)
    first = world.live[0].slice("a")
    for event in [("c", ("step", ([3], [], False, "device"))), ("c", ("engine", [4])), ("c", ("engine", [5, 6]))]:
        for message in world.publish(event):
            read(world.live[0], message)
    last = world.live[0].slice("c")
    assert first is not None
    assert last is not None
    assert first.seq < last.seq
    feed, view = world._reader()
    for piece in (first, last):
        for _ in feed.load(piece, 0.0):
            pass
    with capture_logs() as logs:
        for message in world.nats.after(first.seq):
            read(feed, message)
            assert contents(view.index)["c"] == {"device": {5, 6}}  # not lost and found again
    assert [entry for entry in logs if entry["event"] == "kv.gap"] == []
    assert contents(view.index) == contents(world.reference[1].index) == {"a": {"device": {1}}, "c": {"device": {5, 6}}}
    assert feed.sources.complete("c")
