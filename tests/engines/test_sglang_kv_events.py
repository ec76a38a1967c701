"""SGLang's cache events, from a real SGLang with a host tier: the values that come out are those of an ingress."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.blocks import block_chain
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Output, Sequence
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.translator import Translator
from headrace.workers.sglang.engine import SglangEngine
from tests.engines.support.sglang_args import ARGS, BLOCK, needs_sglang

pytestmark = [
    needs_sglang,
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(700),
    pytest.mark.filterwarnings("default"),  # SGLang and torch warn about themselves
]

HOST_TIER: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}
ONE = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)


def ids(seed: int, length: int) -> list[int]:
    """Some prompt of its own."""
    return [(seed * 7919 + n * 31) % 40_000 + 100 for n in range(length)]


class World:
    """An engine, and its inventory as a worker keeps it."""

    def __init__(self) -> None:
        self.engine = SglangEngine()
        self.outputs: dict[str, list[Output]] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.translator = Translator(BLOCK)
        self._numbers = itertools.count()

    def sink(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs[output.id].append(output)
            if output.finish or output.fault:
                self.ended[output.id].set()

    async def run(self, prompt: list[int], sampling: Sampling = ONE, **options: Any) -> list[Output]:
        name = f"t{next(self._numbers)}-1-0"
        self.outputs[name], self.ended[name] = [], asyncio.Event()
        await self.engine.submit(Sequence(id=name, token_ids=prompt, prompt_tokens=len(prompt), sampling=sampling, **options))
        async with asyncio.timeout(60):
            await self.ended[name].wait()
        assert self.outputs[name][-1].fault is None, self.outputs[name][-1]
        return self.outputs[name]

    async def until_held(self, tier: str, values: list[int]) -> None:
        async with asyncio.timeout(30):  # the machine may be busy
            while not set(values) <= self.held(tier):
                await asyncio.sleep(0.02)

    def held(self, tier: str) -> set[int]:
        return set(self.translator.inventory()[tier])


def available_memory() -> int:
    """Bytes of this machine."""
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(model_dir: Path) -> AsyncIterator[World]:
    made = World()
    async with asyncio.timeout(300):  # SGLang wants 10 GiB beside a host tier: engines of other files may be up
        while available_memory() < 11 << 30:
            await asyncio.sleep(0.5)
    async with asyncio.timeout(200):
        await made.engine.start(EngineConfig(model=str(model_dir), served_name="smollm2", args=ARGS | HOST_TIER), made.sink)
    feed = KvFeed(made.engine, made.translator, lambda change: None)
    task = asyncio.create_task(feed.run())
    yield made
    task.cancel()
    await asyncio.wait([task])
    await made.engine.stop(5.0)


async def test_the_values_of_pages_are_those_of_the_ingress(world: World) -> None:
    assert world.engine.capabilities.kv_events
    prompt = ids(1, 5 * BLOCK + 7)
    outputs = await world.run(prompt, Sampling(temperature=0.0, max_tokens=2 * BLOCK, ignore_eos=True))
    answer = [token for output in outputs for token in output.ids]
    await world.until_held("device", block_chain(prompt + answer, BLOCK)[:-1])  # the last token is never computed
    odd = world.translator.anomalies
    assert (odd.unplaced, odd.orphans, odd.unknown_removed, odd.odd_sizes) == (0, 0, 0, 0)


async def test_a_salt_is_part_of_the_value(world: World) -> None:
    prompt = ids(2, 3 * BLOCK + 1)
    await world.run(prompt, cache_salt="tenant-1")
    await world.until_held("device", block_chain(prompt, BLOCK, salt="tenant-1"))
    assert not set(block_chain(prompt, BLOCK)) & world.held("device")


async def test_all_batches_can_be_had_again(world: World) -> None:
    prompt = ids(3, 2 * BLOCK + 1)
    await world.run(prompt)
    await world.until_held("device", block_chain(prompt, BLOCK))
    batches = await world.engine.replay_kv(0)
    assert [batch.number for batch in batches] == list(range(len(batches)))
    fresh = Translator(BLOCK)
    for batch in batches:
        fresh.apply(batch)
    assert set(fresh.device) == world.held("device")


async def test_what_the_device_has_no_room_for_is_found_in_the_host_tier(world: World) -> None:
    prompt = ids(4, 20 * BLOCK + 5)
    chain = block_chain(prompt, BLOCK)
    cold = await world.run(prompt, Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))
    await world.until_held("host", chain)
    seed = 100
    while set(chain) & world.held("device"):
        await world.run(ids(seed, 900))
        seed += 1
        assert seed < 130
    assert set(chain) <= world.held("host")
    warm = await world.run(prompt, Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [output.ids for output in warm] == [output.ids for output in cold]
    assert warm[0].cached_tokens == 20 * BLOCK
    await world.until_held("device", chain)


async def test_a_reset_of_the_cache_clears_the_inventory(world: World) -> None:
    await world.engine.control("reset_prefix_cache", {})
    async with asyncio.timeout(30):
        while world.held("device"):
            await asyncio.sleep(0.02)
