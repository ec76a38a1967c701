"""vLLM's cache events, from the real vLLM: the names that come out are those that an ingress computes for the same prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.broker.blocks import block_chain
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import KvBatch
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.translator import CacheChange, Translator
from tests.engines.conftest import Bench

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

BLOCK = 32
ONE = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)


class Reader:
    """The inventory of the engine, as a worker keeps it, and the changes that made it."""

    def __init__(self, bench: Bench) -> None:
        assert bench.info is not None
        self.translator = Translator(BLOCK, blocks=bench.info.blocks)
        self.changes: list[CacheChange] = []
        self.feed = KvFeed(bench.engine, self.translator, self.changes.append)

    @property
    def held(self) -> set[int]:
        return set(self.translator.device)

    async def until_held(self, values: list[int]) -> None:
        async with asyncio.timeout(60):  # the machine may be busy
            while not set(values) <= self.held:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def reading(bench: Bench) -> AsyncIterator[Reader]:
    reader = Reader(bench)
    task = asyncio.create_task(reader.feed.run())
    try:
        yield reader
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reader(bench: Bench) -> AsyncIterator[Reader]:
    async with reading(bench) as made:
        yield made


def ids(seed: int, length: int) -> list[int]:
    """Some prompt of its own."""
    return [(seed * 7919 + n * 31) % 40_000 + 100 for n in range(length)]


async def test_it_can_tell(bench: Bench) -> None:
    assert bench.engine.capabilities.kv_events
    assert bench.info is not None
    assert bench.info.step_tokens > 0


async def test_the_names_of_blocks_are_those_of_the_ingress(bench: Bench, reader: Reader) -> None:
    prompt = ids(1, 5 * BLOCK + 7)
    answer = await bench.ids(prompt, Sampling(temperature=0.0, max_tokens=2 * BLOCK, ignore_eos=True))
    await reader.until_held(block_chain(prompt, BLOCK))
    whole = block_chain(prompt + answer, BLOCK)
    await reader.until_held(whole[:-1])  # the last token is never computed
    assert reader.translator.anomalies.unplaced == reader.translator.anomalies.orphans == 0


async def test_a_salt_is_part_of_the_name(bench: Bench, reader: Reader) -> None:
    prompt = ids(802, 3 * BLOCK)  # that no other test asks for: the engine is shared, and holds theirs without a salt
    await bench.ids(prompt, ONE, cache_salt="tenant-1")
    await reader.until_held(block_chain(prompt, BLOCK, salt="tenant-1"))
    assert not set(block_chain(prompt, BLOCK)) & reader.held
    longer = prompt + ids(803, 2 * BLOCK)
    await bench.ids(longer, ONE, cache_salt="tenant-1")  # its first event has a parent and no salt
    await reader.until_held(block_chain(longer, BLOCK, salt="tenant-1"))


async def test_copies_of_a_block_are_counted_and_it_goes_with_the_last(bench: Bench, reader: Reader) -> None:
    """Sequences that compute the same blocks at the same time have a copy each."""
    prompt = ids(4, 4 * BLOCK + 3)
    names = [await bench.submit(prompt, ONE) for _ in range(4)]
    for name in names:
        await bench.end(name)
    chain = block_chain(prompt, BLOCK)
    await reader.until_held(chain)
    assert bench.info is not None
    filling, seed = bench.info.blocks * BLOCK, 100
    while filling > 0 or set(chain) & reader.held:  # until everything older is evicted
        await bench.ids(ids(seed, 900), ONE)
        filling -= 900
        seed += 1
        assert seed < 200
    assert any(change.removed for change in reader.changes)
    assert len(reader.held) <= bench.info.blocks
    assert reader.translator.anomalies.unknown_removed == 0


async def replayed(bench: Bench) -> set[int]:
    """What the engine holds, according to everything it has ever said."""
    fresh = Translator(BLOCK)
    for batch in await bench.engine.replay_kv(0):
        fresh.apply(batch)
    return set(fresh.device)


async def test_a_new_reader_learns_everything_from_the_replay(bench: Bench, reader: Reader) -> None:
    prompt = ids(5, 2 * BLOCK)
    await bench.ids(prompt, ONE)
    await reader.until_held(block_chain(prompt, BLOCK))
    assert await replayed(bench) == reader.held


async def test_a_lost_batch_is_had_again(bench: Bench, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, lost = reader.feed._on_batch, []

    async def lossy(batch: KvBatch) -> bool:
        if not lost:
            lost.append(batch)
            return True
        return await arrived(batch)

    monkeypatch.setattr(reader.feed, "_on_batch", lossy)
    first, second = ids(6, 2 * BLOCK), ids(9, 2 * BLOCK)
    await bench.ids(first, ONE)
    await bench.ids(second, ONE)
    await reader.until_held(block_chain(first, BLOCK) + block_chain(second, BLOCK))
    assert len(lost) == 1
    assert await replayed(bench) == reader.held


async def test_a_reset_of_the_cache_clears_the_inventory(bench: Bench, reader: Reader) -> None:
    prompt = ids(7, 2 * BLOCK)
    await bench.ids(prompt, ONE)
    await reader.until_held(block_chain(prompt, BLOCK))
    assert (await bench.engine.control("reset_prefix_cache", {}))["result"]
    after = ids(8, 2 * BLOCK)
    await bench.ids(after, ONE)
    await reader.until_held(block_chain(after, BLOCK))
    assert reader.held == set(block_chain(after, BLOCK))


async def test_what_a_step_did_and_what_is_queued_is_reported(bench: Bench, reader: Reader) -> None:
    long = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)
    names = [await bench.submit(ids(20, 3 * BLOCK), long)]
    while not bench.outputs[names[0]]:
        await asyncio.sleep(0.005)
    names.append(await bench.submit(ids(21, 900), long, expected_cached=0))
    assert bench.engine.load().queued_prefill_tokens == 900
    seen = []
    while not bench.outputs[names[1]]:
        await asyncio.sleep(0.001)
        seen.append(bench.engine.load())
    await asyncio.sleep(0.2)
    load = bench.engine.load()
    assert load.queued_prefill_tokens == 0
    assert (load.step_prefill_tokens, load.step_decodes) == (0, 2)
    assert load.step_s > 0
    assert load.blocks_used >= (900 + 3 * BLOCK) // BLOCK
    await bench.engine.abort(names)
