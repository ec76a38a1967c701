"""What keeps the index of a router current, over NATS in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from headrace.broker.codec import encode, pack_u64
from headrace.broker.membership.members import Members
from headrace.broker.messages.events import KvReset, KvStep
from headrace.broker.messages.members import WorkerMember
from headrace.jetstream.ports import Messaging
from headrace.router.index import follower, reader, sources
from headrace.router.index.follower import KvFollower
from headrace.router.index.snapshot import Source
from headrace.router.index.snapshotter import ReplicaDeps
from tests.support.router.cache_oracle import OracleView
from tests.support.router.snapshot_fakes import POOL, SUBJECTS, FakeNats


class FakeMembers:
    def __init__(self) -> None:
        self.live: dict[str, WorkerMember] = {}

    def workers(self, pool: str) -> dict[str, WorkerMember]:
        return self.live

    async def ready(self, timeout_s: float) -> None:
        return None


class Bed:
    def __init__(self) -> None:
        self.nats = FakeNats()
        self.members = FakeMembers()
        self.view = OracleView()
        self.follower = KvFollower(
            ReplicaDeps(messaging=cast("Messaging", self.nats), subjects=SUBJECTS, pool=POOL, router="r", block_size=16),
            self.view,
            self.view.index,
            members=cast("Members", self.members),
        )

    def step(self, n: int, *blocks: int) -> None:
        message = KvStep(worker="w", epoch=1, n=n, stored={"device": pack_u64(blocks)})
        self.nats.append(SUBJECTS.kv(POOL, "w"), encode(message))

    def held(self) -> set[int]:
        return self.view.index.held.get("w", {"device": set()})["device"]


@pytest.fixture
async def bed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bed]:
    monkeypatch.setattr(follower, "TICK_S", 0.005)
    monkeypatch.setattr(sources, "FIRST_ASK_S", 0.0)
    monkeypatch.setattr(sources, "STRANGER_S", 0.05)
    made = Bed()
    made.members.live["w"] = WorkerMember(worker="w", pool=POOL, model="m", kv_events=True)
    running = asyncio.ensure_future(made.follower.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_ready_at_once_when_there_is_nothing(bed: Bed) -> None:
    await until(lambda: bed.follower.ready)
    assert bed.follower.lag == 0


async def test_a_member_that_says_nothing_is_asked_and_its_answer_heard(bed: Bed) -> None:
    await until(lambda: SUBJECTS.control("w") in bed.nats.sent)
    reset = KvReset(worker="w", epoch=1, n=9, dump=1, part=0, last=True, blocks={"device": pack_u64([4, 5])})
    bed.nats.append(SUBJECTS.kv(POOL, "w"), encode(reset))
    await until(lambda: bed.held() == {4, 5})
    assert bed.follower.reader.sources.complete("w")


async def test_a_worker_whose_lease_is_gone_is_dropped(bed: Bed) -> None:
    bed.step(0, 1)
    await until(lambda: bed.held() == {1})
    bed.members.live.clear()
    await until(lambda: "w" not in bed.view.index.held)


async def test_events_of_a_worker_wait_while_its_blocks_are_written_down(bed: Bed) -> None:
    """Else a snapshot would have some blocks of before and some of after, under one number."""
    bed.step(0, 1)
    await until(lambda: bed.held() == {1})
    work = bed.follower.reader.slicing("w")
    next(work)
    bed.step(1, 2)
    await asyncio.sleep(0.02)
    assert bed.held() == {1}
    with pytest.raises(StopIteration) as end:
        next(work)
    assert (end.value.value.n, bytes(end.value.value.blocks["device"])) == (0, pack_u64([1]))
    await until(lambda: bed.held() == {1, 2})


async def test_others_get_their_turn_during_a_large_change(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SLICE_BLOCKS", 16)
    monkeypatch.setattr("headrace.router.index.reader.SHARE_S", 0.0)
    await until(lambda: bed.follower.ready)
    bed.step(0, *range(1000))
    seen = set()
    async with asyncio.timeout(10):
        while len(bed.held()) < 1000:
            seen.add(len(bed.held()))
            await asyncio.sleep(0)
    assert len(seen) > 20


async def test_a_stream_trimmed_ahead_of_the_reader_begins_it_anew(bed: Bed) -> None:
    bed.step(0, 1)
    await until(lambda: bed.held() == {1})
    store = bed.follower.snapshotter.store
    bed.step(1, 2)
    await until(lambda: bed.held() == {1, 2})
    piece = bed.follower.reader.slice("w")
    assert piece is not None
    source = Source(POOL, 16, store.stream, bed.nats.created)
    await store.save(source, [piece], seq=piece.seq, at=1.0)
    bed.follower.reader.seq = 0  # as if it had stood still since before
    bed.follower._doubtful = True
    bed.step(2, 3)
    await until(lambda: bed.follower.restored is not None and bed.follower.restored.source == "snapshot")
    await until(lambda: bed.held() == {1, 2, 3} and bed.follower.ready)


async def test_a_clock_that_jumps_raises_doubt(bed: Bed) -> None:
    await until(lambda: bed.follower.ready)
    asked: list[bool] = []
    check = bed.follower._check_not_purged

    async def noted() -> None:
        asked.append(True)
        await check()

    bed.follower._check_not_purged = noted  # type: ignore[method-assign]
    bed.step(0, 1)
    await until(lambda: bed.held() == {1})
    assert asked == []
    bed.follower._alive_s -= 60.0  # it was stopped for a minute
    bed.step(1, 2)
    await until(lambda: bed.held() == {1, 2})
    assert asked == [True]
