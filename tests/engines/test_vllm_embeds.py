"""Prompts as embeddings, against the real vLLM started so that it takes them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, StoredTensor, read_matrix
from headrace.workers.errors import RequestInvalid
from tests.engines.conftest import ARGS, Bench

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def table(model_dir: Path) -> Any:
    """The model's own embeddings: a row per token."""
    from safetensors import safe_open

    config = json.loads((model_dir / "config.json").read_bytes())
    (name,) = model_dir.glob("*.safetensors")
    with safe_open(name, "pt") as weights:
        rows = weights.get_tensor("model.embed_tokens.weight")
    assert rows.shape == (config["vocab_size"], config["hidden_size"])
    return rows.float()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def taking(model_dir: Path) -> AsyncIterator[Bench]:
    bench = Bench()
    args = ARGS | {"enable_prompt_embeds": True, "max_num_batched_tokens": 64}
    async with asyncio.timeout(180):
        bench.info = await bench.engine.start(EngineConfig(model=str(model_dir), served_name="smollm2", args=args), bench.sink)
    yield bench
    await bench.engine.stop(5.0)


def saved(tensor: Any) -> StoredTensor:
    import torch

    file = io.BytesIO()
    torch.save(tensor, file)
    return read_matrix(file.getvalue(), param="prompt_embeds")


async def test_it_says_that_it_takes_them(taking: Bench) -> None:
    assert taking.info is not None
    assert taking.info.prompt_embeds
    assert taking.engine.capabilities.prompt_embeds


async def test_the_embeddings_of_tokens_give_the_answer_to_these_tokens(
    taking: Bench, prompts: list[list[int]], table: Any
) -> None:
    async def each(prompt: list[int]) -> None:
        expected = await taking.ids(prompt, GREEDY)
        embeds = saved(table[prompt])
        assert await taking.ids([0] * len(prompt), GREEDY, prompt_embeds=embeds) == expected
        again = await taking.end(await taking.submit([0] * len(prompt), GREEDY, prompt_embeds=embeds))
        assert (again[0].cached_tokens or 0) % 32 == 0

    await asyncio.gather(*map(each, prompts))


async def test_other_embeddings_are_not_taken_for_those_in_the_cache(
    taking: Bench, prompts: list[list[int]], table: Any
) -> None:
    long = prompts[0] * 2
    await taking.ids([0] * len(long), GREEDY, prompt_embeds=saved(table[long]))
    other = [*reversed(long)]
    outputs = await taking.end(await taking.submit([0] * len(other), GREEDY, prompt_embeds=saved(table[other])))
    assert outputs[0].cached_tokens == 0
    assert [token for output in outputs for token in output.ids] == await taking.ids(other, GREEDY)


async def test_an_answer_to_embeddings_goes_on_after_what_was_emitted(
    taking: Bench, prompts: list[list[int]], table: Any
) -> None:
    prompt = prompts[0]
    whole = await taking.ids([0] * len(prompt), GREEDY, prompt_embeds=saved(table[prompt]))
    rest = Sampling(temperature=0.0, max_tokens=11, ignore_eos=True)
    resumed = await taking.ids(
        [0] * len(prompt) + whole[:5], rest, prompt_tokens=len(prompt), prompt_embeds=saved(table[prompt])
    )
    assert resumed == whole[5:]


async def test_prompts_computed_in_parts_are_scored_like_those_computed_at_once(
    taking: Bench, prompts: list[list[int]]
) -> None:
    long = (prompts[0] * 6)[:150]  # a step takes 64 tokens
    outputs = await taking.end(await taking.submit(long, GREEDY, prompt_logprobs=0))
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    assert [score.id for score in scores[1:] if score] == long[1:]
    assert all(score is not None and not score.top and score.rank for score in scores[1:])


async def test_embeddings_of_another_width_are_refused(taking: Bench) -> None:
    import torch

    with pytest.raises(RequestInvalid, match="prompt_embeds is 2 × 7") as caught:
        await taking.submit([0, 0], prompt_embeds=saved(torch.zeros(2, 7)))
    assert caught.value.param == "prompt_embeds"
    assert taking.engine.load().running == 0
