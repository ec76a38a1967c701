"""Blocks go to a store and come back; a store that is slow, full or gone costs a bounded time and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import pytest

from headrace.workers.vllm.tiers.block_record import seal
from headrace.workers.vllm.tiers.block_store import BlockAbsent, StoreFailed
from headrace.workers.vllm.tiers.transfers import Change, Limits, Transfers

SIZE = 64
SOON_S = 30.0  # the machine may be busy
A, B, C = b"a" * SIZE, b"b" * SIZE, b"c" * SIZE


class FakeStore:
    """Blocks in a dict, behind a door that a test can close."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.door = asyncio.Event()
        self.door.set()
        self.error: Exception | None = None
        self.asked = 0
        self.full = False
        self.refused = 0
        self.closed = False

    async def _come_in(self) -> None:
        self.asked += 1
        await self.door.wait()
        if self.error is not None:
            raise self.error

    async def held(self, names: Sequence[str]) -> Collection[str]:
        await self._come_in()
        return self.kept.keys() & set(names)

    async def read(self, name: str) -> bytes:
        await self._come_in()
        if name not in self.kept:
            raise BlockAbsent(name)
        return self.kept[name]

    async def write(self, name: str, record: bytes) -> Sequence[str]:
        await self._come_in()
        if self.full:
            self.refused += 1
            raise StoreFailed("no space left")
        self.kept[name] = record
        return ["oldest"] if name == "last" else []

    async def remove(self, name: str) -> None:
        await self._come_in()
        del self.kept[name]

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def transfers(store: FakeStore, pause_s: float) -> Iterator[Transfers]:
    made = Transfers(store, size=SIZE, limits=Limits(wait_s=0.2, write_s=0.2, buffer_bytes=3 * SIZE, pause_s=pause_s))
    yield made
    store.door.set()
    made.close()


@pytest.fixture
def pause_s() -> float:
    return 0.1


for_long = pytest.mark.parametrize("pause_s", [1000.0])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def views(*blocks: bytes) -> list[memoryview]:
    return [memoryview(block) for block in blocks]


def load(transfers: Transfers, *names: str) -> tuple[list[str], list[bytes]]:
    """Load blocks; return the names that arrived, and what is in all places."""
    places = [bytearray(SIZE) for _ in names]
    transfers.load(7, names, [memoryview(place) for place in places])
    until(lambda: transfers.loaded)
    end = transfers.loaded.popleft()
    assert (end.job, end.of) == (7, len(names))
    return list(end.names), [bytes(place) for place in places]


def test_blocks_come_back_into_their_places(transfers: Transfers) -> None:
    transfers.store(["a", "b"], views(A, B)).result(SOON_S)
    until(lambda: len(transfers.changes) == 2)
    assert transfers.held(["a", "c", "b"]) == [True, False, True]
    assert load(transfers, "b", "a") == (["b", "a"], [B, A])
    assert not transfers.troubles()


def test_a_block_may_be_overwritten_as_soon_as_it_was_accepted(store: FakeStore, transfers: Transfers) -> None:
    store.door.clear()
    block = bytearray(A)
    transfers.store(["a"], [memoryview(block)]).result(SOON_S)
    block[:] = B
    store.door.set()
    until(lambda: transfers.changes)
    assert store.kept["a"] == seal("a", A)


def test_what_the_store_has_is_not_written_again(store: FakeStore, transfers: Transfers) -> None:
    store.kept["a"] = seal("a", A)
    transfers.store(["a", "b"], views(A, B)).result(SOON_S)
    until(lambda: "b" in store.kept)
    until(lambda: transfers.changes)
    assert list(transfers.changes) == [Change(["b"], removed=False)]


def test_what_made_room_is_told(transfers: Transfers) -> None:
    transfers.store(["last"], views(A)).result(SOON_S)
    until(lambda: len(transfers.changes) == 2)
    assert list(transfers.changes) == [Change(["last"], removed=False), Change(["oldest"], removed=True)]


def test_where_nothing_reads_changes_none_are_kept(store: FakeStore) -> None:
    made = Transfers(store, size=SIZE, tells=False)
    made.store(["last"], views(A)).result(SOON_S)
    until(lambda: store.kept)
    made.close()
    assert not made.changes


def test_of_a_prefix_that_is_not_whole_the_rest_is_loaded(store: FakeStore, transfers: Transfers) -> None:
    store.kept["a"] = seal("a", A)
    assert load(transfers, "a", "b") == (["a"], [A, bytes(SIZE)])


def test_a_damaged_block_is_absent_and_goes(store: FakeStore, transfers: Transfers) -> None:
    store.kept["a"] = seal("a", A)[:-1] + b"x"
    store.kept["b"] = seal("another", B)
    store.kept["c"] = seal("c", C)
    assert load(transfers, "a", "b", "c") == (["c"], [bytes(SIZE), bytes(SIZE), C])
    assert list(store.kept) == ["c"]
    assert transfers.troubles() == {"damaged": 2}


@for_long
def test_a_slow_store_makes_a_look_up_wait_for_its_deadline_once(store: FakeStore, transfers: Transfers) -> None:
    store.door.clear()
    start = time.monotonic()
    assert transfers.held(["a"]) == [False]
    assert time.monotonic() - start < SOON_S
    assert transfers.held(["a"]) == [False]
    assert store.asked == 1  # it is left alone then
    assert transfers.troubles() == {"late": 1, "left_alone": 1}


def test_a_slow_store_gives_what_it_can_before_the_deadline_and_nothing_after_it(
    store: FakeStore, transfers: Transfers
) -> None:
    store.kept["a"] = seal("a", A)
    store.door.clear()
    names, places = load(transfers, "a")
    assert names == []
    store.door.set()
    transfers.drain()
    assert places == [bytes(SIZE)]
    assert transfers.troubles()["late"] == 1


def test_a_slow_store_is_given_no_more_than_the_buffer_holds(store: FakeStore, transfers: Transfers) -> None:
    store.door.clear()
    accepted = transfers.store([f"n{number}" for number in range(5)], views(A, A, A, A, A))
    accepted.result(SOON_S)
    assert transfers.troubles()["dropped"] == 2


def test_a_full_store_takes_nothing_and_still_gives(store: FakeStore, transfers: Transfers) -> None:
    store.kept["a"] = seal("a", A)
    store.full = True
    transfers.store(["b"], views(B)).result(SOON_S)
    until(lambda: store.refused)
    until(lambda: transfers.held(["a"]) == [True])  # as soon as its pause is over
    assert load(transfers, "a") == (["a"], [A])
    assert list(store.kept) == ["a"]


@for_long
@pytest.mark.parametrize("error", [StoreFailed("the broker is gone"), RuntimeError("a mistake")])
def test_a_store_that_is_gone_has_nothing_and_is_asked_once(store: FakeStore, transfers: Transfers, error: Exception) -> None:
    store.kept["a"] = seal("a", A)
    store.error = error
    assert transfers.held(["a"]) == [False]
    assert load(transfers, "a") == ([], [bytes(SIZE)])
    transfers.store(["b"], views(B)).result(SOON_S)
    assert transfers.troubles() == {"failed": 1, "left_alone": 1, "dropped": 1}
    assert store.asked == 1


def test_a_store_that_is_back_is_used_again(store: FakeStore, transfers: Transfers) -> None:
    store.kept["a"] = seal("a", A)
    store.error = StoreFailed("the broker is gone")
    assert load(transfers, "a") == ([], [bytes(SIZE)])
    store.error = None
    until(lambda: transfers.held(["a"]) == [True])
    assert load(transfers, "a") == (["a"], [A])


def test_a_load_that_is_given_up_has_its_end_and_writes_no_more(store: FakeStore) -> None:
    patient = Transfers(store, size=SIZE, limits=Limits(wait_s=1000.0))
    store.kept["a"] = seal("a", A)
    store.door.clear()
    place = bytearray(SIZE)
    patient.load(1, ["a"], [memoryview(place)])
    until(lambda: store.asked)
    patient.drain()
    assert [(end.job, end.names) for end in patient.loaded] == [(1, [])]
    store.door.set()
    patient.close()
    assert place == bytes(SIZE)


def test_closing_stores_what_was_accepted_and_closes_the_store(store: FakeStore) -> None:
    made = Transfers(store, size=SIZE)
    made.store(["a"], views(A)).result(SOON_S)
    made.close()
    assert store.kept == {"a": seal("a", A)}
    assert store.closed
