"""The `openai` client against a frontend and a simulated model: every option of chat."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from headrace.workers.sim.tokens import expected_text
from tests.integration.frontend.openai_client.calls import HI, MODEL, SCHEMA, chat, complete, events, said

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_chat_has_every_field_the_client_knows(client: AsyncOpenAI) -> None:
    answer = await chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, answer.service_tier) == ("chat.completion", MODEL, None)
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    message = choice.message
    assert (message.role, message.refusal, message.tool_calls) == ("assistant", None, None)
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens_details.cached_tokens is not None


async def test_a_streamed_chat_says_the_same(client: AsyncOpenAI) -> None:
    whole = await chat(client, seed=7)
    stream = await events(await chat(client, seed=7, stream=True, stream_options={"include_usage": True}))
    assert "".join(e.choices[0].delta.content or "" for e in stream if e.choices) == whole.choices[0].message.content
    assert stream[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in stream if e.choices][-1] == "length"
    assert stream[-1].choices == []
    assert stream[-1].usage == whole.usage
    assert all(e.usage is None for e in stream[:-1])


async def test_usage_can_come_with_every_event(client: AsyncOpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await events(await chat(client, stream=True, stream_options=options))
    counts = [e.usage.completion_tokens for e in stream if e.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_choices_differ_and_keep_their_order(client: AsyncOpenAI) -> None:
    answer = await chat(client, n=3, temperature=1, seed=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) > 1
    assert answer.usage.completion_tokens == 36
    again = await chat(client, n=3, temperature=1, seed=3)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    stream = await events(await chat(client, n=3, temperature=1, seed=3, stream=True))
    texts = ["", "", ""]
    for event in stream:
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == [c.message.content for c in answer.choices]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "stops"), [("three", "three"), (["x", "y", "z", "four"], "four")])
async def test_stop_strings_end_an_answer(client: AsyncOpenAI, stream: bool, stop: Any, stops: str) -> None:
    text = "one two three four five"
    made = await chat(client, stop=stop, max_tokens=50, stream=stream, extra_body=said(text))
    expected = text[: text.index(stops)]
    if not stream:
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == (expected, "stop")
        assert made.choices[0].stop_reason == stops
        return
    seen = await events(made)
    assert "".join(e.choices[0].delta.content or "" for e in seen) == expected
    assert (seen[-1].choices[0].finish_reason, seen[-1].choices[0].stop_reason) == ("stop", stops)


async def test_a_stop_string_can_be_kept(client: AsyncOpenAI) -> None:
    body = {**said("one two three"), "include_stop_str_in_output": True}
    assert (await chat(client, stop="two", max_tokens=50, extra_body=body)).choices[0].message.content == "one two"


async def test_stop_token_ids_end_an_answer(client: AsyncOpenAI) -> None:
    ids = (await chat(client, extra_body={"return_token_ids": True})).choices[0].token_ids
    answer = await chat(client, extra_body={"return_token_ids": True, "stop_token_ids": [ids[4]]})
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[4])
    assert choice.token_ids == ids[: ids.index(ids[4]) + 1]


async def test_length_is_counted_and_bounded(client: AsyncOpenAI) -> None:
    assert (await chat(client, max_tokens=3)).usage.completion_tokens == 3
    options = {"max_tokens": openai.omit, "max_completion_tokens": 4}
    assert (await chat(client, **options)).usage.completion_tokens == 4
    short = await chat(client, max_tokens=50, extra_body=said("hello"))
    assert short.choices[0].finish_reason == "stop"
    longer = await chat(client, max_tokens=20, extra_body={"min_tokens": 20})
    assert longer.usage.completion_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_chat(client: AsyncOpenAI, stream: bool) -> None:
    made = await chat(client, logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        seen = await events(made)
        items = [i for e in seen for c in e.choices if c.logprobs for i in c.logprobs.content]
        text = "".join(e.choices[0].delta.content or "" for e in seen)
    else:
        items, text = made.choices[0].logprobs.content, made.choices[0].message.content
    assert len(items) == 12
    assert b"".join(bytes(i.bytes) for i in items).decode() == text
    assert all(len(i.top_logprobs) == 3 and i.logprob <= 0 for i in items)
    assert all(i.top_logprobs[0].logprob >= i.top_logprobs[-1].logprob for i in items)


async def test_json_is_forced(client: AsyncOpenAI) -> None:
    answer = await chat(client, response_format={"type": "json_object"}, max_tokens=200)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    format_ = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
    for stream in (False, True):
        made = await chat(client, response_format=format_, max_tokens=200, stream=stream)
        text = made.choices[0].message.content if not stream else ""
        if stream:
            text = "".join([e.choices[0].delta.content or "" for e in await events(made)])
        place = json.loads(text)
        assert (set(place), type(place["size"])) == ({"city", "size"}, int)


async def test_the_clients_own_parsing_of_schemas_works(client: AsyncOpenAI) -> None:
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str
        size: int

    answer = await client.chat.completions.parse(model=MODEL, messages=HI, response_format=Place, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Place)


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"choice": ["up", "down"]}}, lambda text: text in ("up", "down")),
        ({"guided_regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"guided_json": SCHEMA}, lambda text: set(json.loads(text)) == {"city", "size"}),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
async def test_every_kind_of_guide_reaches_the_engine(client: AsyncOpenAI, body: dict[str, Any], fits: Any) -> None:
    answer = await chat(client, max_tokens=200, extra_body=body)
    assert fits(answer.choices[0].message.content)


async def test_biases_and_bans_change_the_answer(client: AsyncOpenAI) -> None:
    plain = (await chat(client, extra_body={"return_token_ids": True})).choices[0].token_ids
    banned = plain[0]
    for options in (
        {"logit_bias": {str(banned): -100}},
        {"extra_body": {"allowed_token_ids": [i for i in plain if i != banned]}},
    ):
        extra = {**options.pop("extra_body", {}), "return_token_ids": True}
        other = (await chat(client, **options, extra_body=extra)).choices[0].token_ids
        assert banned not in other


@pytest.mark.parametrize(
    ("tier", "told"), [("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority")]
)
async def test_the_tier_is_echoed(client: AsyncOpenAI, tier: Any, told: str) -> None:
    assert (await chat(client, service_tier=tier)).service_tier == told
    stream = await events(await chat(client, service_tier=tier, stream=True))
    assert {e.service_tier for e in stream} == {told}


async def test_what_has_no_effect_is_accepted(client: AsyncOpenAI) -> None:
    plain = await chat(client)
    options = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    vendor = {
        "cache_salt": "pepper",
        "session_id": "s1",
        "priority": 3,
        "stream_interval": 2,
        "mm_payload": "none",
        "nobody": 1,
    }
    answer = await chat(client, **options, extra_body=vendor)
    assert answer.choices[0].message.content == plain.choices[0].message.content


async def test_prompts_and_ids_can_be_shown(client: AsyncOpenAI) -> None:
    body = {"return_token_ids": True, "return_prompt_text": True, "request_id": "mine-1", "prompt_logprobs": 2}
    answer = await chat(client, extra_body=body)
    assert answer.id == "chatcmpl-mine-1"
    assert "Say hello." in answer.prompt_text
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens == len(answer.prompt_logprobs)
    assert answer.prompt_logprobs[0] is None
    assert all(str(i) in found for i, found in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True))
    assert set(next(iter(answer.prompt_logprobs[1].values()))) == {"logprob", "rank", "decoded_token"}


async def test_the_final_message_can_be_continued_and_echoed(client: AsyncOpenAI) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well then"}]
    body = {"add_generation_prompt": False, "continue_final_message": True, "echo": True, **said(", hello")}
    answer = await chat(client, messages=messages, max_tokens=50, extra_body=body)
    assert answer.choices[0].message.content == "Well then, hello"


async def test_repeated_prompts_are_found_in_the_cache(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "A long story about a river. " * 20}]
    await chat(client, messages=messages)
    assert (await chat(client, messages=messages)).usage.prompt_tokens_details.cached_tokens > 0
    salted = await chat(client, messages=messages, extra_body={"cache_salt": "somebody-else"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template"),
    ({"n": 2, "extra_body": {"use_beam_search": True}}, "use_beam_search"),
    ({"modalities": ["audio"], "audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
]


@pytest.mark.parametrize(("options", "param"), REFUSED)
async def test_the_client_sees_what_was_wrong(client: AsyncOpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(client, **options)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


async def test_the_simulator_says_what_it_should(client: AsyncOpenAI) -> None:
    """What all of the above stands on: the answer is a function of the prompt."""
    answer = await complete(client, extra_body={"return_token_ids": True})
    ids = answer.choices[0].prompt_token_ids
    assert answer.choices[0].text == expected_text(ids, max_tokens=12)
