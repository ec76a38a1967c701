"""Cached blocks of the stand-in for TensorRT-LLM: told, found again, kept apart, and nothing wrong after lost events."""

from __future__ import annotations

import pytest

from headrace.broker.blocks import block_chain
from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.kv.translator import Translator
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import (
    PROMPT,
    CacheView,
    follow,
    inventory,
    running,
    sequence,
    versions,
)


@versions
async def test_cached_blocks_are_told_and_found_again(version: str) -> None:
    async with running(version=version) as bench:
        await bench.run(sequence("a", max_tokens=4))
        view = CacheView()
        await follow(bench, view, lambda view: len(view.held) >= 2)
        assert sorted(view.tier("device")) == [tuple(PROMPT[:32]), tuple(PROMPT[32:64])]  # the partial block is not told
        await bench.run(sequence("b", max_tokens=2))
        assert bench.outputs("b")[0].cached_tokens == 64
        assert await bench.engine.replay_kv(0)


@versions
async def test_a_cache_salt_keeps_blocks_apart(version: str) -> None:
    async with running(version=version) as bench:
        await bench.run(sequence("a", max_tokens=1, cache_salt="one"))
        await bench.run(sequence("b", max_tokens=1, cache_salt="two"))
        await bench.run(sequence("c", max_tokens=1, cache_salt="one"))
        assert [bench.outputs(name)[0].cached_tokens for name in "abc"] == [0, 0, 64]
        if version == stand_in.V1_3:  # 1.2 does not tell salts
            await bench.until(lambda: {event.salt for event in inventory(bench)} == {"one", "two"})


@versions
async def test_salted_blocks_are_never_found_by_others_and_seem_so_to_readers_in_1_2_alone(version: str) -> None:
    """1.2 tells no salts, so readers take salted blocks for those of plain prompts: a guess that is wrong, not an answer."""
    async with running(version=version) as bench:
        await bench.run(sequence("salted", max_tokens=4, cache_salt="one"))
        translator = Translator(32)
        view = CacheView()

        def apply(view: CacheView) -> bool:
            return len(view.held) >= 2

        await follow(bench, view, apply)
        translator.apply(KvBatch([KvEvent(kind="cleared"), *inventory(bench)], 0))
        plain, salted = block_chain(PROMPT, 32), block_chain(PROMPT, 32, salt="one")
        assert [value in translator.device for value in salted] == [version == stand_in.V1_3] * 2
        assert [value in translator.device for value in plain] == [version == stand_in.V1_2] * 2
        await bench.run(sequence("plain", max_tokens=4))
        assert bench.outputs("plain")[0].cached_tokens == 0, "the engine itself keeps them apart"
        await bench.run(sequence("again", max_tokens=4, cache_salt="one"))
        assert bench.outputs("again")[0].cached_tokens == 64


@versions
async def test_blocks_in_the_host_cache_are_told_as_such_and_come_back(version: str) -> None:
    cache = {"max_tokens": 8 * 32, "host_cache_size": 64 << 20}
    async with running(version=version, kv_cache_config=cache) as bench:
        assert (bench.info.blocks, bench.info.extra["host_cache_bytes"]) == (8, 64 << 20)
        for n in range(4):
            await bench.run(sequence(f"s{n}", list(range(n * 1000, n * 1000 + 100)), max_tokens=2))
        view = CacheView()
        await follow(bench, view, lambda view: len(view.held) >= 12)
        assert len(view.tier("device")) <= 8
        assert len(view.tier("host")) >= 4
        await bench.run(sequence("again", list(range(100)), max_tokens=2))
        assert bench.outputs("again")[0].cached_tokens == 96


@versions
async def test_lost_events_are_noticed_and_nothing_wrong_is_told(version: str) -> None:
    async with running(version=version) as bench:
        await bench.run(sequence("a", max_tokens=1))
        await bench.until(lambda: len(inventory(bench)) == 2)
        bench.llm._executor.lose_events(3)
        await bench.run(sequence("b", list(range(500, 540)), max_tokens=1))
        view = CacheView()
        await follow(bench, view, lambda view: view.tier("device") == [tuple(range(500, 532))])
        assert view.partial


async def test_without_a_prefix_cache_there_are_no_events() -> None:
    async with running(kv_cache_config={"enable_block_reuse": False, "max_tokens": 3200}) as bench:
        assert not bench.engine.capabilities.kv_events
        assert bench.info.blocks == 100
        with pytest.raises(UnsupportedByEngine):
            bench.engine.kv_events()


@versions
async def test_the_load_is_what_the_statistics_say(version: str) -> None:
    async with running(version=version, options={"timing": "cpu-small"}, max_batch_size=2) as bench:
        for n in range(5):
            await bench.engine.submit(sequence(f"s{n}", [n + 1] * 40, max_tokens=400))
        await bench.until(lambda: bench.engine.load().running == 2)
        load = bench.engine.load()
        assert (load.waiting, load.blocks_total) == (3, 512)
        assert load.queued_prefill_tokens == 3 * 40
        await bench.until(lambda: bench.engine.load().step_decodes == 2)
        assert bench.engine.load().step_s > 0.0
        assert bench.engine.load().blocks_used >= 2
        await bench.engine.abort([f"s{n}" for n in range(5)])
        assert (bench.engine.load().running, bench.engine.load().queued_prefill_tokens) == (0, 0)
