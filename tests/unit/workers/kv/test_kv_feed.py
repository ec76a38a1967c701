"""What is lost between an engine and its worker is had again, or the cache is read anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import structlog

from headrace.broker.blocks import block_chain
from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import EngineDead, EngineError
from headrace.workers.kv import feed as subject
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.translator import CacheChange, Translator
from tests.unit.workers.sim.test_engine import sequence, started

SIZE = 4


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "READ_AGAIN_S", 0.001)


class FakeEngine:
    """Says what it is told to; has a cache to be read anew."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[KvBatch | Exception] = asyncio.Queue()
        self.kept: list[KvBatch] = []
        self.cached: list[KvEvent] = []
        self.partial = False
        self.readings = 0
        self.last = -1

    async def kv_events(self, rank: int = 0) -> AsyncGenerator[KvBatch]:
        self.readings += 1
        yield KvBatch([KvEvent(kind="cleared"), *self.cached], self.last, partial=self.partial)
        while True:
            batch = await self.batches.get()
            if isinstance(batch, Exception):
                raise batch
            yield batch

    async def replay_kv(self, start: int, rank: int = 0) -> list[KvBatch]:
        return [batch for batch in self.kept if batch.number >= start]

    def make(self, token: int, *, parent: int | None = None) -> KvBatch:
        event = KvEvent(kind="stored", hashes=[token], token_ids=[token] * SIZE, parent=parent)
        self.last += 1
        batch = KvBatch([event], self.last)
        self.cached.append(event)
        self.kept.append(batch)
        return batch


def name(token: int) -> int:
    return block_chain([token] * SIZE, SIZE)[0]


class Bench:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.translator = Translator(SIZE)
        self.changes: list[CacheChange] = []
        self.feed = KvFeed(engine, self.translator, self.changes.append)

    async def until_held(self, values: set[int]) -> None:
        async with asyncio.timeout(5):
            while set(self.translator.device) != values:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def feeding(engine: Any = None) -> AsyncIterator[Bench]:
    bench = Bench(engine or FakeEngine())
    task = asyncio.create_task(bench.feed.run())
    while not bench.changes:
        await asyncio.sleep(0)
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_what_is_cached_at_the_start_is_the_first_change():
    engine = FakeEngine()
    engine.make(1)
    async with feeding(engine) as bench:
        await bench.until_held({name(1)})
        assert bench.changes[0].stored == {"device": [name(1)]}


async def test_lost_and_late_batches_are_put_in_order():
    async with feeding() as bench:
        batches = [bench.engine.make(n) for n in range(6)]
        for number in (0, 3, 1, 2, 5, 4, 5):
            bench.engine.batches.put_nowait(batches[number])
        await bench.until_held({name(n) for n in range(6)})
        assert bench.engine.readings == 1


async def test_what_cannot_be_had_again_is_read_anew():
    async with feeding() as bench:
        batches = [bench.engine.make(n) for n in range(4)]
        bench.engine.kept.clear()
        bench.engine.batches.put_nowait(batches[0])
        with structlog.testing.capture_logs() as logs:
            bench.engine.batches.put_nowait(batches[3])
            await bench.until_held({name(n) for n in range(4)})
        assert bench.engine.readings == 2
        assert [line["event"] for line in logs] == ["kv.gap"]


async def test_an_unknown_parent_is_cleared_up_by_reading_anew_but_not_for_ever():
    async with feeding() as bench:
        with structlog.testing.capture_logs() as logs:
            bench.engine.batches.put_nowait(bench.engine.make(1, parent=77))
            bench.engine.batches.put_nowait(bench.engine.make(2, parent=78))
            bench.engine.batches.put_nowait(bench.engine.make(3))
            await bench.until_held({name(3)})
        assert bench.engine.readings == 2
        assert [line["event"] for line in logs] == ["kv.unknown_parent"]
        assert bench.translator.lost  # it will be read anew when that is allowed again


async def test_an_engine_that_cannot_tell_everything_is_believed_as_far_as_it_goes():
    engine = FakeEngine()
    engine.partial = True
    async with feeding(engine) as bench:
        engine.batches.put_nowait(engine.make(1, parent=77))
        engine.batches.put_nowait(engine.make(2))
        await bench.until_held({name(2)})
        assert engine.readings == 1


async def test_while_nothing_can_be_read_nothing_is_claimed():
    async with feeding() as bench:
        bench.engine.batches.put_nowait(bench.engine.make(1))
        await bench.until_held({name(1)})
        with structlog.testing.capture_logs() as logs:
            bench.engine.batches.put_nowait(EngineError("broken pipe"))
            async with asyncio.timeout(5):
                while bench.engine.readings < 2:
                    await asyncio.sleep(0.001)
        assert logs == [{"event": "kv.feed_failed", "error": "broken pipe", "log_level": "error"}]
        assert any(change.cleared for change in bench.changes)
        await bench.until_held({name(1)})


async def test_a_dead_engine_ends_it():
    bench = Bench(FakeEngine())
    bench.engine.batches.put_nowait(EngineDead("gone"))
    async with asyncio.timeout(5):
        await bench.feed.run()


async def test_blocks_of_another_size_are_refused_aloud():
    async with feeding() as bench:
        with structlog.testing.capture_logs() as logs:
            for number in range(3):
                event = KvEvent(kind="stored", hashes=[number], token_ids=[1] * 6)
                bench.engine.batches.put_nowait(KvBatch([event], number))
            async with asyncio.timeout(5):
                while bench.translator.anomalies.odd_sizes < 3:
                    await asyncio.sleep(0.001)
        assert logs == [{"event": "kv.block_size", "got": 6, "expected": 4, "log_level": "error"}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"faults": {"kv_drop_every": 3}},
        {"faults": {"kv_reorder_every": 2}},
        {"faults": {"kv_drop_every": 5, "kv_reorder_every": 3}, "kv_replay_batches": 4},
        {"faults": {"kv_drop_every": 2}, "kv_replay_batches": 0},
    ],
)
async def test_the_inventory_of_a_simulated_engine_is_exact(options):
    """Evictions, tiers and shared prefixes, with events lost and out of order."""
    sizes = {"blocks": 24, "host_blocks": 12, "disk_blocks": 6}
    arguments = {"block_size": SIZE, "context_length": 64, "slots": 4} | sizes | options
    async with started(**arguments) as bench, feeding(bench.engine) as fed:
        for n in range(40):
            shared = [n % 3] * 12
            await bench.engine.submit(sequence(str(n), [*shared, *[n % 7] * (n % 11)], max_tokens=5))
            if n % 4 == 3:
                await bench.until(lambda n=n: all(bench.finished(str(k)) for k in range(n + 1)))
        scheduler = bench.engine._scheduler
        assert scheduler is not None
        manager = scheduler.manager

        def truth() -> dict[str, set[int]]:
            held: dict[str, set[int]] = {"device": set(), "host": set(), "disk": set()}
            for event in manager.inventory():
                held[event.tier] |= set(event.hashes)  # the simulator's hashes are chain values
            return held

        async with asyncio.timeout(10):
            n = 1000
            while {tier: set(values) for tier, values in fed.translator.inventory().items()} != truth():
                n += 1  # the last batch may be lost, and that shows with the next one
                await bench.engine.submit(sequence(str(n), [n] * 8, max_tokens=1))
                await bench.until(lambda n=n: bench.finished(str(n)))
                await asyncio.sleep(0.01)
        assert all(truth().values())
        assert fed.translator.anomalies.unknown_removed == 0
