"""Two data-parallel ranks of a real vLLM, each a process with a cache of its own: sequences go to the rank that they name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Output, Sequence
from headrace.workers.vllm.engine import VllmEngine
from tests.engines.support.media_world import ARGS
from tests.engines.support.tiny_vision import write_vision_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long_engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

PROMPT = [1, *(50 + number for number in range(100))]
BLOCKS = len(PROMPT) // 32
SOON_S = 240.0


async def test_a_rank_computes_what_names_it_and_tells_of_its_own_cache(tmp_path: Path, model_dir: Path) -> None:
    outputs: dict[str, list[Output]] = {}

    def sink(step: list[Output]) -> None:
        for output in step:
            outputs.setdefault(output.id, []).append(output)

    engine = VllmEngine()
    folder = write_vision_model(tmp_path / "model", model_dir)
    config = EngineConfig(model=str(folder), served_name="m", args={**ARGS, "data_parallel_size": 2})
    info = await engine.start(config, sink)
    stored = {0: 0, 1: 0}

    async def listen(rank: int) -> None:
        async for batch in engine.kv_events(rank):
            stored[rank] += sum(len(event.hashes) for event in batch if event.kind == "stored")

    async def ask(name: str, rank: int) -> tuple[list[int], int | None]:
        sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
        await engine.submit(Sequence(id=name, token_ids=PROMPT, prompt_tokens=len(PROMPT), rank=rank, sampling=sampling))
        while not any(output.finish or output.fault for output in outputs.get(name, ())):
            await asyncio.sleep(0.01)
        return [token for output in outputs[name] for token in output.ids], outputs[name][0].cached_tokens

    listeners = [asyncio.create_task(listen(rank)) for rank in stored]
    try:
        assert info.ranks == 2
        async with asyncio.timeout(SOON_S):
            first, cached = await ask("a", 0)
            assert (len(first), cached) == (8, 0)
            assert await ask("b", 0) == (first, 32 * BLOCKS)
            assert await ask("c", 1) == (first, 0), "the other rank has a cache of its own"
            assert await ask("d", 1) == (first, 32 * BLOCKS)
            while min(stored.values()) < BLOCKS:
                await asyncio.sleep(0.05)
        assert stored == {0: BLOCKS, 1: BLOCKS}
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.wait(listeners)
        await engine.stop(5.0)
