"""The whole on real input: a real model answers the real `openai` client over NATS, token for token as vLLM alone does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.engines.conftest import DIRECT_TOKENS, QUESTIONS
from tests.engines.served.conftest import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
def api(ours: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ours}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_chat_is_token_for_token_what_the_engine_alone_answers(
    api: openai.OpenAI, direct: list[list[int]], tokenizer: Any, number: int
) -> None:
    messages: Any = [{"role": "user", "content": QUESTIONS[number]}]
    options: Any = {"model": MODEL, "messages": messages, "max_tokens": DIRECT_TOKENS, "temperature": 0}
    whole = api.chat.completions.create(logprobs=True, **options)
    expected = direct[number]
    choice = whole.choices[0]
    assert choice.message.content == tokenizer.decode(expected)
    assert choice.logprobs is not None
    tokens = [bytes(entry.bytes or b"") for entry in choice.logprobs.content or []]
    assert b"".join(tokens).decode().startswith(choice.message.content)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(expected)

    pieces = list(api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    text = "".join(c.delta.content or "" for chunk in pieces for c in chunk.choices)
    assert text == choice.message.content
    assert sum(bool(c.delta.content) for chunk in pieces for c in chunk.choices) > len(expected) // 2, "it was streamed"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.prompt_tokens_details is not None
    assert (pieces[-1].usage.prompt_tokens_details.cached_tokens or 0) > 0, "the second time the prompt is cached"


def test_the_answer_is_sensible(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=24, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_structured_output_reaches_the_engine(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is the sky blue? Answer yes or no."}],
        max_tokens=8,
        extra_body={"guided_choice": ["yes", "no"]},
    )
    assert answer.choices[0].message.content in ("yes", "no")


def test_a_wrong_parameter_is_refused_by_name(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=9)
    assert refused.value.param == "temperature"
