"""Requests name an adapter, a rank and a priority, and the adapter for TensorRT-LLM passes them on."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.workers.errors import EngineError, RequestInvalid, UnsupportedByEngine
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import PROMPT, CacheView, follow, running, sequence, versions


@versions
async def test_requests_go_to_the_attention_rank_they_name_and_its_blocks_are_told(version: str) -> None:
    args = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with running(version=version, **args) as bench:
        assert (bench.info.ranks, bench.info.blocks, bench.info.slots) == (2, 1024, 32)
        await bench.run(sequence("r0", max_tokens=1, rank=0))
        await bench.run(sequence("other", list(range(900, 940)), max_tokens=1, rank=1))
        await bench.run(sequence("r1", max_tokens=1, rank=0, extra={"attention_dp_rank": 1}))  # what the client says counts
        await bench.run(sequence("again", max_tokens=1, rank=1))
        assert [bench.outputs(name)[0].cached_tokens for name in ("r0", "r1", "again")] == [0, 0, 64]
        for rank, held in ((0, 2), (1, 3)):
            view = CacheView()
            await follow(bench, view, lambda view, held=held: len(view.held) == held, rank=rank)
            assert tuple(PROMPT[:32]) in view.tier("device")
            assert (tuple(range(900, 932)) in view.tier("device")) == (rank == 1)
        with pytest.raises(RequestInvalid, match="ranks 0 to 1"):
            await bench.engine.submit(sequence("x", extra={"attention_dp_rank": 2}))


@versions
async def test_adapters_are_chosen_per_request_and_can_be_added_and_removed(tmp_path: Path, version: str) -> None:
    folder = str(stand_in.adapter_folder(tmp_path / "fr"))
    async with running(version=version, adapters={"fr": folder}) as bench:
        assert (bench.info.adapters, bench.engine.capabilities.lora) == (("fr",), "dynamic")
        await bench.run(sequence("base"), sequence("fr", adapter="fr"))
        assert bench.ids("base") != bench.ids("fr")
        source = str(stand_in.adapter_folder(tmp_path / "de"))
        await bench.engine.control("load_adapter", {"name": "de", "source": source})
        await bench.engine.control("load_adapter", {"name": "de", "source": source})  # nothing more
        await bench.run(sequence("de", adapter="de"))
        assert bench.ids("de") not in (bench.ids("base"), bench.ids("fr"))
        with pytest.raises(EngineError, match="unload it first"):
            await bench.engine.control("load_adapter", {"name": "de", "source": folder})
        large = str(stand_in.adapter_folder(tmp_path / "large", rank=64))
        with pytest.raises(EngineError, match="max_lora_rank=8"):
            await bench.engine.control("load_adapter", {"name": "large", "source": large})
        await bench.engine.control("unload_adapter", {"name": "de"})
        with pytest.raises(RequestInvalid, match="no adapter 'de'; it has: fr"):
            await bench.engine.submit(sequence("x", adapter="de"))
    async with running(version=version) as bench:
        with pytest.raises(UnsupportedByEngine):
            await bench.engine.control("load_adapter", {"name": "de", "source": source})


async def test_a_lower_priority_number_is_served_sooner_where_the_release_knows_priorities() -> None:
    async with running(options={"timing": "cpu-small"}, max_batch_size=1) as bench:
        assert bench.engine.capabilities.priority
        await bench.engine.submit(sequence("running", max_tokens=3))
        await bench.until(lambda: bool(bench.ids("running")))
        for name, priority in (("late", 5), ("soon", -5)):
            await bench.engine.submit(sequence(name, max_tokens=1, priority=priority))
        await bench.until(lambda: bench.ended("late") and bench.ended("soon"))
        order = [output.id for call in bench.calls for output in call]
        assert order.index("soon") < order.index("late")
    async with running(version=stand_in.V1_2) as bench:
        assert not bench.engine.capabilities.priority
