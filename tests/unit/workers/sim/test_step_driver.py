"""How the simulator's driver waits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.settings import Faults
from headrace.workers.sim.step_driver import EventBuffer, pass_time, until_work
from tests.unit.workers.sim.test_engine import sequence, started


class FakeExchange:
    """To be looked at after `pause_s`, or never; the look number `finds` finds something."""

    def __init__(self, pause_s: float | None, finds: int = 0) -> None:
        self.pause_s, self.finds = pause_s, finds
        self.looks = 0

    def poll_at(self) -> float | None:
        return None if self.pause_s is None else asyncio.get_running_loop().time() + self.pause_s

    def poll(self) -> bool:
        self.looks += 1
        return self.looks == self.finds


class FakeScheduler:
    def __init__(self, exchange: FakeExchange, due_in_s: float | None = None) -> None:
        self.exchange = exchange
        self.due = None if due_in_s is None else asyncio.get_running_loop().time() + due_in_s

    def next_at(self) -> float | None:
        return self.due


async def test_other_engines_are_listened_to_while_a_step_runs():
    exchange = FakeExchange(0.001)
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.05
    await pass_time(exchange, until, loop.time)  # type: ignore[arg-type]
    assert exchange.looks >= 2
    assert loop.time() >= until


async def test_a_step_without_duration_gives_way_once():
    others = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    await pass_time(FakeExchange(None), 0.0, asyncio.get_running_loop().time)  # type: ignore[arg-type]
    assert others


async def test_while_blocks_move_it_looks_without_a_pause_and_others_run_in_between():
    exchange, others = FakeExchange(0.0, finds=50), 0

    async def beside() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(beside())
    await until_work(FakeScheduler(exchange), asyncio.Event())  # type: ignore[arg-type]
    task.cancel()
    assert exchange.looks == 50
    assert others >= 49


async def test_it_waits_for_work_for_what_is_due_and_for_its_next_look():
    loop, work = asyncio.get_running_loop(), asyncio.Event()
    async with asyncio.timeout(5):
        loop.call_later(0.01, work.set)
        await until_work(FakeScheduler(FakeExchange(None)), work)  # type: ignore[arg-type]
        work.clear()
        await until_work(FakeScheduler(FakeExchange(None), due_in_s=0.01), work)  # type: ignore[arg-type]
        work.clear()
        await until_work(FakeScheduler(FakeExchange(0.01)), work)  # type: ignore[arg-type]


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
