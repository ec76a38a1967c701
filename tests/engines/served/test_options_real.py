"""Options that say how a request is handled, and those that are refused, by the real clients against the real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.engines.served.conftest import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HI: Any = [{"role": "user", "content": "Name three colours."}]
PLAIN: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 8}


@pytest.fixture
def api(ours: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ours}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def words(api: openai.OpenAI, **options: Any) -> str:
    answer = api.chat.completions.create(**{**PLAIN, **options})
    assert answer.choices[0].message.content
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize(
    "options",
    [
        {"metadata": {"who": "a test"}},
        {"user": "somebody"},
        {"service_tier": "flex"},
        {"service_tier": "priority"},
        {"extra_body": {"priority": 3}},
        {"extra_body": {"session_id": "s1"}},
        {"extra_body": {"cache_salt": "of its own"}},
        {"extra_headers": {"X-Session-ID": "s2"}},
        {"seed": 5},
    ],
    ids=str,
)
def test_how_a_request_is_handled_changes_nothing_of_its_answer(api: openai.OpenAI, options: dict[str, Any]) -> None:
    assert words(api, **options) == words(api)


def test_a_seed_draws_the_same_again_and_another_draws_something_else(api: openai.OpenAI) -> None:
    drawn = [words(api, temperature=1.5, max_tokens=24, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_grammar_is_obeyed(api: openai.OpenAI) -> None:
    grammar = {"grammar": 'root ::= "red" | "green" | "blue"'}
    assert words(api, extra_body={"structured_outputs": grammar}) in ("red", "green", "blue")


@pytest.mark.parametrize(("option", "value"), [("best_of", 2), ("suffix", "the end")])
def test_what_is_not_offered_is_refused_by_name(api: openai.OpenAI, option: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model=MODEL, prompt="Once", max_tokens=4, **{option: value})
    assert refused.value.param == option


def test_anthropics_client_counts_the_tokens_that_a_message_then_has(ours: str) -> None:
    with anthropic.Anthropic(base_url=ours, api_key="none", max_retries=0, timeout=120) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
        usage = client.messages.create(model=MODEL, messages=HI, max_tokens=4).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
