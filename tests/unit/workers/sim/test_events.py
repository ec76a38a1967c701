"""Numbered batches of KV events: gaps show, and can be filled."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.events import EventBuffer
from headrace.workers.sim.faults import Faults
from tests.unit.workers.sim.test_engine import sequence, started


class Repairing:
    """A reader as it should be: it applies batches in the order of their numbers and asks for those that are missing."""

    def __init__(self, buffer: EventBuffer) -> None:
        self.buffer = buffer
        self.view: set[int] = set()
        self.next = 0
        self.repairs = 0

    def take(self, batch: KvBatch) -> None:
        if batch and batch[0].kind == "cleared":
            self.next = batch.number
        elif batch.number > self.next:
            self.repairs += 1
            for missing in self.buffer.replay(self.next):
                if missing.number < batch.number:
                    self.apply(missing)
        if batch.number >= self.next:
            self.apply(batch)

    def apply(self, batch: KvBatch) -> None:
        assert batch.number == self.next
        self.next += 1
        for event in batch:
            if event.kind == "cleared":
                self.view.clear()
            elif event.kind == "stored":
                self.view |= set(event.hashes)
            else:
                self.view -= set(event.hashes)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.booleans()), max_size=40),
    st.sampled_from([None, 2, 3, 5]),
    st.sampled_from([None, 2, 3]),
)
def test_a_reader_that_asks_for_what_it_missed_knows_everything(changes, drop, reorder):
    async def play() -> None:
        buffer = EventBuffer(replay=64, faults=Faults(kv_drop_every=drop, kv_reorder_every=reorder))
        cached: set[int] = set()

        def inventory() -> list[KvEvent]:
            return [KvEvent(kind="stored", hashes=sorted(cached))]

        reader = buffer.read(inventory)
        state = Repairing(buffer)
        state.take(await anext(reader))
        for store, value, look in changes:
            (cached.add if store else cached.discard)(value)
            buffer.put([KvEvent(kind="stored" if store else "removed", hashes=[value])], inventory)
            while look and buffer._steps:
                state.take(await anext(reader))
        while buffer._steps:
            state.take(await anext(reader))
        for missing in buffer.replay(state.next):
            state.apply(missing)
        assert state.view == cached
        await reader.aclose()

    asyncio.run(play())


async def numbers(buffer: EventBuffer, count: int) -> list[int]:
    reader = buffer.read(list)
    await anext(reader)
    for value in range(count):
        buffer.put([KvEvent(kind="stored", hashes=[value])], list)
    seen = []
    while buffer._steps:
        seen.append((await anext(reader)).number)
    await reader.aclose()
    return seen


async def test_batches_are_numbered_without_gaps():
    assert await numbers(EventBuffer(), 5) == [0, 1, 2, 3, 4]


async def test_lost_and_late_batches_are_seen_by_their_numbers():
    assert await numbers(EventBuffer(faults=Faults(kv_drop_every=3)), 7) == [0, 1, 3, 4, 6]
    assert await numbers(EventBuffer(faults=Faults(kv_reorder_every=3)), 8) == [0, 1, 3, 2, 4, 6, 5, 7]


async def test_what_is_kept_for_replay_is_bounded_and_has_no_holes():
    buffer = EventBuffer(replay=3)
    reader = buffer.read(list)
    await anext(reader)
    for value in range(5):
        buffer.put([KvEvent(kind="stored", hashes=[value])], list)
    assert [batch.number for batch in buffer.replay(0)] == [2, 3, 4]
    assert [batch.number for batch in buffer.replay(4)] == [4]
    await reader.aclose()
    buffer.put([], list)
    assert buffer.replay(0) == []


async def test_a_reader_that_begins_during_a_step_is_not_told_twice_what_it_did():
    buffer = EventBuffer(replay=8)
    reader = buffer.read(lambda: [KvEvent(kind="stored", hashes=[7])], ahead=True)
    assert [event.kind for event in await anext(reader)] == ["cleared", "stored"]
    buffer.put([KvEvent(kind="stored", hashes=[7])], list)
    buffer.put([KvEvent(kind="stored", hashes=[8])], list)
    during, after = await anext(reader), await anext(reader)
    assert (during.number, list(during)) == (0, [])
    assert (after.number, after[0].hashes) == (1, [8])
    await reader.aclose()


async def test_the_engine_replays_what_it_lost():
    faults = {"kv_drop_every": 2}
    async with started(block_size=4, context_length=128, faults=faults) as bench:
        reader = bench.engine.kv_events()
        first = await anext(reader)
        assert isinstance(first, KvBatch)
        assert first.number == -1
        for n in range(3):
            await bench.engine.submit(sequence(str(n), [n] * 4, max_tokens=1))
            await bench.until(lambda n=n: bench.finished(str(n)))
        async with asyncio.timeout(5):
            seen = [await anext(reader) for _ in range(2)]
        assert [batch.number for batch in seen] == [0, 2]
        replayed = await bench.engine.control("replay_kv_events", {"from": 1})
        assert [batch["number"] for batch in replayed["batches"]] == [1, 2]
        assert replayed["next"] == 3
        (event,) = replayed["batches"][0]["events"]
        assert (event["kind"], event["tier"], event["token_ids"]) == ("stored", "device", [1] * 4)
        for wrong in (-1, "x"):
            with pytest.raises(RequestInvalid):
                await bench.engine.control("replay_kv_events", {"from": wrong})
