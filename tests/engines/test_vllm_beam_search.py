"""Beam search beside vLLM's own, over random models: the algorithm of vLLM's server runs here without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.workers.runtime.beam_search import BeamSearch
from tests.unit.workers.runtime.test_beam_search import END, model, searched

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

PROMPT = [5, 6, 5]


class Client:
    """vLLM's engine, as far as its beam search asks it: log-probabilities of a random model."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.input_processor = SimpleNamespace(resolve_watermarking=lambda _: None)

    async def generate(self, prompt: Any, sampling: Any, request_id: str, **_: Any) -> Any:
        ids = tuple(prompt["prompt_token_ids"][len(PROMPT) :])
        top = {token: SimpleNamespace(logprob=logprob) for token, _, logprob in model(self.seed, ids)[: sampling.logprobs]}
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="length", logprobs=[top])])


async def of_vllm(seed: int, *, width: int, most: int, penalty: float, keep_end: bool) -> list[tuple]:
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.inputs import tokens_input
    from vllm.sampling_params import BeamSearchParams

    class Server(BeamSearchOnlineMixin):
        renderer: Any = SimpleNamespace(
            get_tokenizer=lambda: SimpleNamespace(eos_token_id=END, decode=lambda ids, skip_special_tokens: "")
        )
        engine_client: Any = Client(seed)

    params = BeamSearchParams(
        beam_width=width,
        max_tokens=most,
        length_penalty=penalty,
        include_stop_str_in_output=keep_end,
    )
    (answer,) = [one async for one in Server().beam_search(tokens_input(list(PROMPT)), "r", params)]
    return [(list(one.token_ids), one.cumulative_logprob, one.finish_reason, one.stop_reason) for one in answer.outputs]


async def test_the_same_beams_are_found_in_the_same_order() -> None:
    drawn = random.Random(3)
    ended = 0
    for seed in range(150):
        width, most = drawn.randint(1, 3), drawn.randint(1, 8)
        penalty = drawn.choice([-2.0, 0.0, 0.7, 1.0, 2.5])
        keep_end = drawn.random() < 0.3
        search = BeamSearch(
            width=width,
            prompt_tokens=len(PROMPT),
            max_tokens=most,
            end_ids={END},
            length_penalty=penalty,
            keep_end=keep_end,
        )
        ours = [(ids, total, "length" if end is None else "stop", end) for ids, total, end in searched(search, seed)]
        ended += sum(reason == "stop" for _, _, reason, _ in ours)
        theirs = await of_vllm(seed, width=width, most=most, penalty=penalty, keep_end=keep_end)
        assert ours == theirs, (seed, width, most, penalty, keep_end)
    assert ended > 50
