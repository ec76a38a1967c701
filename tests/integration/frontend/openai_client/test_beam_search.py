"""Beam search by the `openai` client, against a frontend and a simulated model."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from tests.integration.frontend.openai_client.calls import chat, complete

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_beam_search_has_its_best_beam_first_and_counts_the_prompt_once(client: AsyncOpenAI) -> None:
    plain = await chat(client)
    beams = await chat(client, n=3, logprobs=True, top_logprobs=2, extra_body={"use_beam_search": True})
    texts = [choice.message.content for choice in beams.choices]
    assert texts[0] == plain.choices[0].message.content, "the simulator's own token is always the likeliest"
    assert len(set(texts)) == 3
    totals = [sum(token.logprob for token in choice.logprobs.content) for choice in beams.choices]
    assert totals == sorted(totals, reverse=True)
    assert [len(token.top_logprobs) for token in beams.choices[0].logprobs.content] == [2] * 12
    assert {choice.finish_reason for choice in beams.choices} == {"length"}
    assert (beams.usage.prompt_tokens, beams.usage.completion_tokens) == (plain.usage.prompt_tokens, 3 * 12)


async def test_each_prompt_has_a_beam_search_of_its_own(client: AsyncOpenAI) -> None:
    prompts = ["Once upon a time", "The sea"]
    answer = await complete(client, prompt=prompts, n=2, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    best = [(await complete(client, prompt=prompt)).choices[0].text for prompt in prompts]
    assert [answer.choices[0].text, answer.choices[2].text] == best
