"""The simulator as a pooling engine."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace.broker.messages.requests import PoolingTask
from headrace.workers.engine import EngineConfig, EngineInfo, PoolItem, Role
from headrace.workers.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineStartFailed,
    RequestInvalid,
)
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.tokens import BUNDLED_TOKENIZER

TOKENIZER = Tokenizer.from_file(str(BUNDLED_TOKENIZER / "tokenizer.json"))


class Bench:
    def __init__(self, engine: SimEngine, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self._count = 0

    async def pool(self, ids: list[int], task: PoolingTask = "embed", **more: Any) -> list[float]:
        self._count += 1
        pooled = await self.engine.pool(PoolItem(id=f"i{self._count}", task=task, token_ids=ids, **more))
        return array("f", pooled.vector).tolist()

    async def text(self, text: str, **more: Any) -> list[float]:
        return await self.pool(TOKENIZER.encode(text).ids, **more)

    async def pair(self, first: str, second: str, **more: Any) -> float:
        encoded = TOKENIZER.encode(first, second)
        (score,) = await self.pool(encoded.ids, "classify", second=encoded.type_ids.index(1), **more)
        return score


@asynccontextmanager
async def started(pooling: str = "embed", **args: Any) -> AsyncIterator[Bench]:
    engine = SimEngine()
    info = await engine.start(
        EngineConfig(model="sim", served_name="m", args={"pooling": pooling, **args}), lambda outputs: None
    )
    try:
        yield Bench(engine, info)
    finally:
        await engine.stop(1.0)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


async def test_an_embedding_is_a_function_of_the_ids_alone_and_has_length_one() -> None:
    async with started() as one, started(slots=1, step_tokens=7) as other:
        vectors = [await bench.text("The quick brown fox jumps over the lazy dog.") for bench in (one, one, other)]
        assert vectors[0] == vectors[1] == vectors[2]
        assert len(vectors[0]) == 64
        assert math.hypot(*vectors[0]) == pytest.approx(1.0, abs=1e-6)


async def test_texts_that_share_words_are_more_alike() -> None:
    async with started() as bench:
        question, near, far = [
            await bench.text(text)
            for text in ("how do I bake bread", "bread that I bake at home", "interest rates rose on Monday")
        ]
        assert cosine(question, near) > 0.3 > cosine(question, far)


async def test_special_tokens_do_not_make_texts_alike() -> None:
    eos = TOKENIZER.token_to_id("<|im_end|>")
    async with started() as bench:
        ids = TOKENIZER.encode("two words").ids
        assert await bench.pool([*ids, eos, eos]) == await bench.pool(ids)
        assert math.hypot(*await bench.pool([eos])) == pytest.approx(1.0, abs=1e-6)


async def test_fewer_dimensions_are_the_first_ones_and_more_are_refused() -> None:
    async with started(vector_size=16) as bench:
        whole, part = await bench.text("some text"), await bench.text("some text", dimensions=4)
        assert cosine(whole[:4], part) == pytest.approx(1.0, abs=1e-6)
        assert math.hypot(*part) == pytest.approx(1.0, abs=1e-6)
        with pytest.raises(RequestInvalid, match="at most 16") as caught:
            await bench.text("some text", dimensions=17)
        assert caught.value.param == "dimensions"


async def test_a_vector_need_not_be_normalized() -> None:
    async with started() as bench:
        plain = await bench.text("one two three four five", normalize=False)
        assert math.hypot(*plain) > 1.5


async def test_a_scorer_prefers_the_text_that_shares_words() -> None:
    async with started("score") as bench:
        good = await bench.pair("how do I bake bread", "to bake bread take flour")
        bad = await bench.pair("how do I bake bread", "interest rates rose on Monday")
        assert 0 < bad < 0.5 < good < 1
        assert await bench.pair("a b", "a b", normalize=False) > 1


async def test_a_classifier_gives_probabilities_and_names() -> None:
    async with started("classify", classes=4) as bench:
        probabilities = await bench.text("any text", task="classify")
        assert (len(probabilities), sum(probabilities)) == (4, pytest.approx(1.0, abs=1e-6))
        assert bench.info.labels == ("class-0", "class-1", "class-2", "class-3")
        assert await bench.text("another thing", task="classify") != probabilities


async def test_an_input_may_fill_the_whole_context() -> None:
    async with started(context_length=64, blocks=2, block_size=32) as bench:
        await bench.pool([5] * 64)
        assert bench.info.context_length == 64


async def test_an_input_takes_the_time_of_its_prefill_and_waits_for_a_slot() -> None:
    async with started(slots=2, timing_overrides={"prefill_tokens_per_s": 0.01}) as bench:
        tasks = [asyncio.create_task(bench.pool([n + 1] * 10)) for n in range(4)]
        async with asyncio.timeout(5):
            while bench.engine.load().step_prefill_tokens == 0:
                await asyncio.sleep(0)
        load = bench.engine.load()
        assert (load.waiting, load.queued_prefill_tokens) == (2, 40)  # 20 of them in the step that has just begun
        assert (load.step_prefill_tokens, load.step_s) == (20, 2000.0)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("faults", "error", "retriable"),
    [
        ({"fault_at_token": 0}, EngineError, True),
        ({"fault_at_token": 0, "fault_retriable": False}, EngineError, False),
        ({"reject": "overloaded"}, EngineOverloaded, True),
        ({"die_at_step": 0}, EngineDead, True),
    ],
)
async def test_injected_faults_reach_inputs(faults: dict[str, Any], error: type[EngineError], retriable: bool) -> None:
    async with started(faults=faults) as bench:
        with pytest.raises(error) as caught:
            await bench.pool([1, 2, 3])
        assert caught.value.retriable is retriable


async def test_it_hands_nothing_over() -> None:
    config = EngineConfig(model="sim", served_name="m", role=Role.PREFILL, args={"pooling": "embed", "fabric": "local"})
    with pytest.raises(EngineStartFailed, match="hands nothing over"):
        await SimEngine().start(config, lambda outputs: None)
