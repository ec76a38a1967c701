"""Snapshots that cannot be used: each is named in the log and counted, and the index begins from something else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from headrace.broker.codec import decode as unpack
from headrace.broker.codec import encode as pack
from headrace.broker.codec import pack_u64, unpack_u64
from headrace.broker.messages.events import KvStep
from headrace.jetstream.errors import LeaseLost, RevisionConflict
from headrace.jetstream.ports import Entry, Messaging
from headrace.router.errors import SettingsInvalid, SnapshotCorrupt, SnapshotError, SnapshotForeign, SnapshotTooNew
from headrace.router.index import inventory
from headrace.router.index import snapshot as format_
from headrace.router.index.inventory import WorkerSlice
from headrace.router.index.reader import KvEventReader
from headrace.router.index.snapshot import Pointer, Restored, SnapshotStore, Source, UnreadablePointer, restore
from headrace.router.index.snapshot import decode_snapshot as decode
from headrace.router.index.snapshot import encode_snapshot as encode
from headrace.router.index.snapshotter import ReplicaDeps, Snapshotter, take_slices
from headrace.router.settings import SnapshotSettings
from tests.support.router.cache_oracle import OracleView
from tests.support.router.snapshot_fakes import POOL, SUBJECTS, FakeNats

SOURCE = Source(POOL, 16, "HR_KV", "2026-01-01T00:00:00Z")
SLICES = [
    WorkerSlice("a", 7, 6, 4, 12, True, {"device": pack_u64([1, 2, 3]), "disk": pack_u64([9])}),
    WorkerSlice("b", 8, -1, 0, 10, False, {}),
]
KEY = f"snapshot.{POOL}"


def written(source: Source = SOURCE, *, seq: int = 10) -> bytes:
    return b"".join(encode(source, SLICES, seq=seq, at=5.0))


# -- the format --------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read() -> None:
    header, slices = decode(written(), SOURCE)
    assert (header.seq, header.at, header.blocks, header.source) == (10, 5.0, 4, SOURCE)
    assert [piece._replace(blocks={t: bytes(b) for t, b in piece.blocks.items()}) for piece in slices] == SLICES


def test_the_first_bytes_are_as_documented() -> None:
    data = written()
    assert data[:8] == b"HRKVSNAP"
    assert data[8:12] == (1).to_bytes(4, "little")
    length = int.from_bytes(data[12:16], "little")
    assert data[16 + length : 16 + length + 8] == (1).to_bytes(8, "little")
    assert len(data) == 16 + length + 4 * 8 + 16


def test_truncated_anywhere_is_corrupt() -> None:
    data = written()
    for length in range(len(data)):
        with pytest.raises(SnapshotCorrupt):
            decode(data[:length], SOURCE)


def test_any_changed_byte_is_noticed() -> None:
    data = written()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x55
        with pytest.raises((SnapshotCorrupt, SnapshotTooNew, SnapshotForeign)):
            decode(bytes(changed), SOURCE)


@pytest.mark.parametrize(
    ("field", "value"), [("pool", "other"), ("block_size", 32), ("stream", "X_KV"), ("created", "2027-01-01T00:00:00Z")]
)
def test_a_foreign_one_says_what_differs(field: str, value: Any) -> None:
    with pytest.raises(SnapshotForeign, match=f"{field.replace('_', ' ')} is .*{value}"):
        decode(written(SOURCE._replace(**{field: value})), SOURCE)


def test_a_newer_version_is_refused_by_name() -> None:
    data = bytearray(written())
    data[8] = 2
    with pytest.raises(SnapshotTooNew, match="version 2"):
        decode(bytes(data), SOURCE)


def test_a_snapshot_cannot_be_of_a_later_message_than_its_slices() -> None:
    with pytest.raises(ValueError, match="slice of b"):
        written(seq=11)


# -- what a router does ------------------------------------------------------------------------------------------------------


class Router:
    """Two snapshots of a worker with blocks 1 and 2, the second one later."""

    def __init__(self) -> None:
        self.nats = FakeNats()
        self.store = SnapshotStore(cast("Messaging", self.nats), SUBJECTS, POOL)
        self.feed, self.view = self.reader()
        self.objects = self.nats.stores["hr_snapshots"]
        self.entries = self.nats.buckets["hr_state"]

    @staticmethod
    def reader() -> tuple[KvEventReader, OracleView]:
        view = OracleView()
        return KvEventReader(view, view.index, pool=POOL), view

    def deps(self) -> ReplicaDeps:
        messaging = cast("Messaging", self.nats)
        return ReplicaDeps(messaging=messaging, subjects=SUBJECTS, pool=POOL, router="r", block_size=16)

    async def run(self) -> None:
        for n in range(4):
            step = KvStep(worker="w", epoch=1, n=n, stored={"device": pack_u64([n])})
            message = self.nats.append(SUBJECTS.kv(POOL, "w"), pack(step))
            self.feed.receive("w", message.seq, message.data, 0.0)
            if n in (1, 2):
                await self.save(at=float(n))

    async def save(self, *, at: float) -> Pointer:
        piece = self.feed.slice("w")
        assert piece is not None
        return await self.store.save(SOURCE, [piece], seq=piece.seq, at=at)

    async def begin(self, block_size: int = 16) -> tuple[Restored, set[int], KvEventReader]:
        feed, view = self.reader()
        begun = await restore(feed, self.store, block_size=block_size)
        for message in self.nats.after(begun.start_seq - 1):
            feed.receive("w", message.seq, message.data, 0.0)
        return begun, view.index.held["w"]["device"], feed

    def change_pointer(self, change: Callable[[dict[str, Any]], None]) -> None:
        entry = self.entries[KEY]
        raw = unpack(dict, entry.value)  # type: ignore[var-annotated]
        change(raw)
        self.entries[KEY] = Entry(KEY, pack(raw), entry.revision)

    async def newest(self) -> str:
        pointer, _revision = await self.store.pointer()
        assert pointer is not None
        return pointer.kept[0].object


@pytest.fixture
async def router() -> Router:
    made = Router()
    await made.run()
    return made


def unusable(reason: str) -> float:
    return REGISTRY.get_sample_value("headrace_router_snapshots_unusable_total", {"reason": reason}) or 0.0


async def test_the_newest_snapshot_and_what_came_after(router: Router) -> None:
    begun, held, _ = await router.begin()
    assert (begun.source, begun.start_seq, begun.target, held) == ("snapshot", 4, 4, {0, 1, 2, 3})


@pytest.mark.parametrize("what", ["truncated", "missing", "version", "foreign"])
async def test_the_older_one_is_used_when_the_newest_cannot_be(router: Router, what: str) -> None:
    name = await router.newest()
    data = router.objects[name]
    if what == "truncated":
        router.objects[name] = data[:-1]
    elif what == "missing":
        del router.objects[name]
    else:
        changed = data[:8] + b"\x02" + data[9:] if what == "version" else written()
        if what == "foreign":
            changed = b"".join(encode(SOURCE._replace(pool="elsewhere"), SLICES, seq=10, at=5.0))
        router.objects[name] = changed
        digest = hashlib.sha256(changed).hexdigest()
        router.change_pointer(lambda raw: raw["kept"][0].update(digest=digest))
    reason = {"truncated": "corrupt"}.get(what, what)
    before = unusable(reason)
    with capture_logs() as logs:
        begun, held, _ = await router.begin()
    assert (begun.source, begun.start_seq, held) == ("older", 3, {0, 1, 2, 3})
    assert unusable(reason) == before + 1
    assert [entry["reason"] for entry in logs if entry["event"] == "snapshot.unusable"] == [reason]


async def test_a_snapshot_that_is_not_the_one_its_pointer_names_is_not_used(router: Router) -> None:
    """Others may write the store, but no pointer: a whole snapshot of theirs, with its own digest at its end."""
    name = await router.newest()
    pointer, _revision = await router.store.pointer()
    assert pointer is not None
    theirs = [WorkerSlice("w", 1, 1, 2, pointer.kept[0].seq, True, {"device": pack_u64([7, 8, 9])})]
    router.objects[name] = b"".join(encode(SOURCE, theirs, seq=pointer.kept[0].seq, at=2.0))
    before = unusable("corrupt")
    begun, held, _ = await router.begin()
    assert (begun.source, held) == ("older", {0, 1, 2, 3})
    assert unusable("corrupt") == before + 1


async def test_a_snapshot_of_another_block_size_leaves_an_empty_index(router: Router) -> None:
    router.nats.drop_up_to(3)
    begun, held, feed = await router.begin(block_size=32)
    assert (begun.source, begun.start_seq) == ("empty", 4)
    assert held == {3}  # what it says itself is true
    feed.sources.put_worker("w", 0.0)
    assert feed.sources.asks(1.0) == ["w"]  # and the rest is asked for


async def test_a_stream_that_no_longer_reaches_back_far_enough_leaves_an_empty_index(router: Router) -> None:
    """Without the check the index would silently lack what was removed."""
    for n in range(4, 8):
        router.nats.append(
            SUBJECTS.kv(POOL, "w"), pack(KvStep(worker="w", epoch=1, n=n, removed={"device": pack_u64([n - 4])}))
        )
    router.nats.drop_up_to(6)
    before = unusable("trimmed")
    begun, held, feed = await router.begin()
    assert (begun.source, begun.start_seq, held) == ("empty", 7, set())
    assert unusable("trimmed") == before + 2
    assert not feed.sources.complete("w")


async def test_a_stream_made_anew_has_no_snapshot(router: Router) -> None:
    router.nats.created = "2026-02-02T00:00:00Z"
    before = unusable("foreign")
    begun, _, _ = await router.begin()
    assert begun.source == "empty"
    assert unusable("foreign") == before + 2


async def test_a_stream_restored_from_older_data_has_no_snapshot(router: Router) -> None:
    for seq in (2, 3, 4):
        del router.nats.messages[seq]
    router.nats.last_seq = 1
    begun, held, _ = await router.begin()
    assert (begun.source, begun.start_seq, held) == ("empty", 1, {0})


@pytest.mark.parametrize("value", [b"\xc1", pack({"v": 9, "kept": []}), pack({"v": 1, "kept": 3})])
async def test_a_pointer_that_cannot_be_read(router: Router, value: bytes) -> None:
    router.entries[KEY] = Entry(KEY, value, router.entries[KEY].revision)
    before = unusable("pointer")
    begun, held, _ = await router.begin()
    assert (begun.source, held) == ("empty", {0, 1, 2, 3})
    assert unusable("pointer") == before + 1
    if b"v\x09" in value:
        with pytest.raises(UnreadablePointer):
            await router.save(at=9.0)  # written by a newer router: not ours to replace
    else:
        await router.save(at=9.0)
        assert (await router.begin())[0].source == "snapshot"


async def test_a_snapshot_found_unusable_is_not_kept(router: Router) -> None:
    """Else the stream would be purged up to one that is of no use to anybody."""
    name = await router.newest()
    router.objects[name] = b"broken"
    await router.begin()
    pointer = await router.save(at=9.0)
    assert [kept.seq for kept in pointer.kept] == [4, 2]


async def test_of_two_writers_one_gives_way(router: Router) -> None:
    rival = SnapshotStore(cast("Messaging", router.nats), SUBJECTS, POOL)
    piece = router.feed.slice("w")
    assert piece is not None
    upload = router.store._objects.put

    async def slow(name: str, data: bytes) -> str:
        digest = await upload(name, data)
        await rival.save(SOURCE, [piece], seq=piece.seq, at=8.0)
        return digest

    router.store._objects.put = slow  # type: ignore[method-assign]
    with pytest.raises(RevisionConflict):
        await router.save(at=9.0)
    assert (await router.begin())[0].source == "snapshot"


async def test_who_leads_no_longer_does_not_write_the_pointer(router: Router) -> None:
    before = router.entries[KEY]
    piece = router.feed.slice("w")
    assert piece is not None
    with pytest.raises(LeaseLost):
        await router.store.save(SOURCE, [piece], seq=piece.seq, at=9.0, leads=lambda: False)
    assert router.entries[KEY] == before


async def test_no_snapshot_of_an_index_that_is_of_another_stream(router: Router) -> None:
    router.feed.created = "2025-01-01T00:00:00Z"
    snapshotter = Snapshotter(router.deps(), router.feed)
    with pytest.raises(SnapshotForeign):
        await snapshotter.snapshot()


async def test_no_snapshot_while_the_index_begins_anew(router: Router) -> None:
    snapshotter = Snapshotter(router.deps(), router.feed)
    slicing = router.feed.slicing

    def reset(worker: str) -> Generator[None, None, WorkerSlice | None]:
        piece = yield from slicing(worker)
        router.feed.reset(0.0)
        return piece

    router.feed.slicing = reset  # type: ignore[method-assign]
    with pytest.raises(SnapshotError, match="anew"):
        await snapshotter.snapshot()


def test_the_version_is_the_one_documented() -> None:
    assert format_.VERSION == 1


async def test_a_worker_whose_blocks_change_under_the_pen_is_read_again(router: Router) -> None:
    """Events wait, but an index that is full evicts."""
    slicing, tries = router.feed.slicing, 0

    def evicting(worker: str) -> Generator[None, None, WorkerSlice | None]:
        nonlocal tries
        tries += 1
        work = slicing(worker)
        next(work)
        yield
        if tries == 1:
            router.view.index.remove("w", "device", [0])
        return (yield from work)

    router.feed.slicing = evicting  # type: ignore[method-assign]
    inventory.PART_BLOCKS, before = 2, inventory.PART_BLOCKS
    try:
        slices, seq = await take_slices(router.feed, rest_s=0.0)
    finally:
        inventory.PART_BLOCKS = before
    assert tries == 2
    assert seq == 4
    assert set(unpack_u64(bytes(slices[0].blocks["device"]))) == {1, 2, 3}
    assert router.feed.reading == ""


@pytest.mark.parametrize(
    ("name", "value"), [("keep", 1), ("every_events", 0), ("every_s", -1.0), ("purge_after_s", float("nan"))]
)
def test_settings_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(SettingsInvalid, match=f"{name} must be .* got {value}"):
        SnapshotSettings(**{name: value})  # type: ignore[arg-type]
