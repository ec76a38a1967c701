"""vLLM's own offloading without a GPU: what the device has no room for is found on the host or in files, and routers hear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.blocks import block_chain
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Output
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.translator import Translator
from tests.engines.conftest import ARGS, Bench

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

BLOCK = 32
ONE = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
FEW = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = ARGS | {
    "max_model_len": 512,
    "kv_cache_memory_bytes": 32 << 20,  # 21 blocks: two other prompts leave nothing of one
}


def ids(seed: int, length: int) -> list[int]:
    """Some prompt of its own."""
    return [(seed * 7919 + n * 31) % 40_000 + 100 for n in range(length)]


class Tiered(Bench):
    """An engine with tiers, and its inventory as a worker keeps it."""

    def __init__(self, *, files: bool) -> None:
        super().__init__()
        self.files = files
        self.translator = Translator(BLOCK)
        self._fillers = 1000

    def held(self, tier: str) -> set[int]:
        return set(self.translator.inventory()[tier])  # type: ignore[index]

    async def until_held(self, tier: str, values: list[int]) -> None:
        """Wait until blocks are known there. vLLM reports what its tiers have done with a step, so ask for one now and then."""
        async with asyncio.timeout(60):  # the machine may be busy
            while not set(values) <= self.held(tier):
                await asyncio.sleep(0.2)
                await self.run(ids(9, BLOCK // 2))

    async def run(self, prompt: list[int], sampling: Sampling = ONE, **options: Any) -> list[Output]:
        outputs = await self.end(await self.submit(prompt, sampling, **options))
        assert outputs[-1].fault is None, outputs[-1].fault
        return outputs

    async def until_evicted(self, chain: list[int]) -> None:
        """Compute other prompts until the device holds nothing of this one."""
        for _ in range(20):
            if not set(chain) & self.held("device"):
                return
            self._fillers += 1
            await self.run(ids(self._fillers, 330))
        raise AssertionError("the device still holds blocks that should have made room")


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["host", "files"])
async def tiered(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Tiered]:
    """An engine with vLLM's host tier alone, by its own setting, or with vLLM's tier of files behind it."""
    files = {"type": "fs", "root_dir": str(tmp_path_factory.mktemp("kv")), "enable_kv_events": True}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 28, "secondary_tiers": [files]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    args = SMALL | ({"kv_offloading_size": 0.25} if request.param == "host" else {"kv_transfer_config": config})
    made = Tiered(files=request.param == "files")
    async with asyncio.timeout(300):  # the machine may be busy
        given = EngineConfig(model=str(model_dir), served_name="smollm2", args=args)
        made.info = await made.engine.start(given, made.sink)
    feed = asyncio.create_task(KvFeed(made.engine, made.translator, lambda change: None).run())
    yield made
    feed.cancel()
    await asyncio.wait([feed])
    await made.engine.stop(5.0)


async def test_a_prefix_that_the_device_dropped_is_found_on_the_host_with_the_same_tokens(tiered: Tiered) -> None:
    prompt = ids(4, 8 * BLOCK + 5)
    chain = block_chain(prompt, BLOCK)
    cold = await tiered.run(prompt, FEW)
    assert cold[0].cached_tokens == 0
    await tiered.until_held("host", chain)
    await tiered.until_evicted(chain)
    assert set(chain) <= tiered.held("host")
    warm = await tiered.run(prompt, FEW)
    assert tokens(warm) == tokens(cold)
    assert warm[0].cached_tokens == 8 * BLOCK
    await tiered.until_held("device", chain)


async def test_a_salted_prefix_is_found_on_the_host_with_its_salt_alone(tiered: Tiered) -> None:
    prompt = ids(5, 4 * BLOCK + 5)
    chain = block_chain(prompt, BLOCK, salt="tenant-1")
    await tiered.run(prompt, cache_salt="tenant-1")
    await tiered.until_held("host", chain)
    assert not set(block_chain(prompt, BLOCK)) & tiered.held("host")
    await tiered.until_evicted(chain)
    assert (await tiered.run(prompt, cache_salt="tenant-2"))[0].cached_tokens == 0
    assert (await tiered.run(prompt))[0].cached_tokens == 0
    assert (await tiered.run(prompt, cache_salt="tenant-1"))[0].cached_tokens == 4 * BLOCK


async def emptied(tiered: Tiered, chain: list[int]) -> None:
    """Empty device and host. What lies behind them stays."""
    assert await tiered.engine.control("reset_prefix_cache", {}) == {"result": True}
    await tiered.run(ids(9, BLOCK))  # vLLM tells with the next step
    async with asyncio.timeout(60):
        while set(chain) & (tiered.held("device") | tiered.held("host")):
            await asyncio.sleep(0.02)


async def test_a_prefix_that_device_and_host_dropped_is_found_in_files_with_the_same_tokens(tiered: Tiered) -> None:
    if not tiered.files:
        pytest.skip("there are none")
    prompt = ids(8, 8 * BLOCK + 5)
    chain = block_chain(prompt, BLOCK)
    cold = await tiered.run(prompt, FEW)
    await tiered.until_held("disk", chain)
    await emptied(tiered, chain)
    warm = await tiered.run(prompt, FEW)
    assert tokens(warm) == tokens(cold)
    assert warm[0].cached_tokens == 8 * BLOCK
    assert (await tiered.run(prompt, cache_salt="tenant-1"))[0].cached_tokens == 0


async def test_what_the_host_tier_does_is_on_the_metrics_page(tiered: Tiered) -> None:
    from prometheus_client import generate_latest

    names = {line.split("{")[0] for line in generate_latest().decode().splitlines() if line.startswith("vllm:kv_offload")}
    assert "vllm:kv_offload_total_bytes_total" in names


async def test_a_reset_is_told_of_the_host_tier_too(tiered: Tiered) -> None:
    prompt = ids(6, 4 * BLOCK + 1)
    chain = block_chain(prompt, BLOCK)
    await tiered.run(prompt)
    await tiered.until_held("host", chain)
    await emptied(tiered, chain)
    odd = tiered.translator.anomalies
    assert (odd.orphans, odd.unknown_removed, odd.odd_sizes) == (0, 0, 0)


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
async def test_blocks_are_copied_to_their_places_in_chunks_and_back(per_chunk: int) -> None:
    import torch

    from headrace.workers.vllm.cpu_offload import MemoryCopies

    device = [torch.arange(60, dtype=torch.int8).view(12, 5), torch.arange(36, dtype=torch.int8).view(12, 3)]
    host = [torch.zeros((6, rows.shape[1] * per_chunk), dtype=torch.int8) for rows in device]
    copies = MemoryCopies(device, host, blocks_per_chunk=per_chunk)
    # four blocks of a sequence from its block 1 on: the first is not the first of its chunk where chunks are longer
    blocks = SimpleNamespace(block_ids=[7, 2, 9, 4], group_sizes=[4], block_indices=[1])
    chunks = SimpleNamespace(block_ids=[5, 0, 3, 1][: -(-(1 % per_chunk + 4) // per_chunk)])
    before = [rows.clone() for rows in device]
    assert copies.submit_store(1, blocks, chunks)
    for rows in device:
        rows[[7, 2, 9, 4]] = 0
    assert copies.submit_load(2, chunks, blocks)
    assert all(torch.equal(rows, was) for rows, was in zip(device, before, strict=True))
    done = copies.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in done] == [(1, True, 32), (2, True, 32)]
    assert copies.get_finished() == []
