"""The `openai` client against a frontend and a simulated model: every option of completions."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.integration.frontend.openai_client.calls import MODEL, SCHEMA, complete, events, said
from tests.unit.workers.test_prompt_embeds import file, pickled

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_completion_has_every_field_the_client_knows(client: AsyncOpenAI) -> None:
    answer = await complete(client)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert (answer.choices[0].finish_reason, answer.choices[0].logprobs) == ("length", None)
    stream = await events(await complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(e.choices[0].text for e in stream if e.choices) == answer.choices[0].text
    assert stream[-1].usage == answer.usage


async def test_prompts_come_as_text_ids_or_lists(client: AsyncOpenAI) -> None:
    one = await complete(client, extra_body={"return_token_ids": True})
    ids = one.choices[0].prompt_token_ids
    text = one.choices[0].text
    assert (await complete(client, prompt=ids)).choices[0].text == text
    assert [c.text for c in (await complete(client, prompt=[ids, ids])).choices] == [text, text]
    both = await complete(client, prompt=["Once upon a time", "Never"], n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == text
    assert both.choices[2].text != text


async def test_a_prompt_comes_as_embeddings(client: AsyncOpenAI) -> None:
    def embeds(*numbers: float) -> str:
        return base64.b64encode(file(pickled((2, 3), (3, 1)), struct.pack("<6f", *numbers))).decode()

    given: dict[str, Any] = {"model": MODEL, "prompt": None, "max_tokens": 8, "temperature": 0}
    first = await client.completions.create(**given, extra_body={"prompt_embeds": embeds(1, 2, 3, 4, 5, 6)})
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (2, 8)
    lots = {"prompt_embeds": [embeds(1, 2, 3, 4, 5, 6), embeds(6, 5, 4, 3, 2, 1)]}
    both = await client.completions.create(**{**given, "prompt": "and text"}, extra_body=lots)
    assert len(both.choices) == 3
    assert both.choices[0].text == first.choices[0].text
    assert both.choices[1].text != first.choices[0].text
    flat = base64.b64encode(file(pickled((6,), (1,)))).decode()
    for wrong in ("AAAA", "not base64!", flat):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**given, extra_body={"prompt_embeds": wrong})
        assert caught.value.param == "prompt_embeds"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_is_echoed(client: AsyncOpenAI, stream: bool) -> None:
    plain = (await complete(client)).choices[0].text
    made = await complete(client, echo=True, stream=stream)
    text = "".join([e.choices[0].text for e in await events(made)]) if stream else made.choices[0].text
    assert text == "Once upon a time" + plain


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_brings_the_prompts_log_probabilities(client: AsyncOpenAI, stream: bool) -> None:
    made = await complete(client, echo=True, logprobs=2, stream=stream, n=2)
    choices = [e.choices[0] for e in await events(made)] if stream else made.choices
    for index in range(2):
        mine = [c for c in choices if c.index == index]
        text = "".join(c.text for c in mine)
        found = [c.logprobs for c in mine if c.logprobs]
        tokens = [t for f in found for t in f.tokens]
        assert "".join(tokens) == text
        assert text.startswith("Once upon a time")
        values = [v for f in found for v in f.token_logprobs]
        assert values[0] is None
        assert all(v <= 0 for v in values[1:])
        assert [o for f in found for o in f.text_offset] == [len("".join(tokens[:i])) for i in range(len(tokens))]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_alone_can_be_scored(client: AsyncOpenAI, stream: bool) -> None:
    made = await complete(client, echo=True, logprobs=1, max_tokens=0, stream=stream)
    choices = [e.choices[0] for e in await events(made)] if stream else made.choices
    assert "".join(c.text for c in choices) == "Once upon a time"
    assert "".join(t for c in choices if c.logprobs for t in c.logprobs.tokens) == "Once upon a time"
    bare = await complete(client, echo=True, max_tokens=0, stream=stream)
    choices = [e.choices[0] for e in await events(bare)] if stream else bare.choices
    assert "".join(c.text for c in choices) == "Once upon a time"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_completion(client: AsyncOpenAI, stream: bool) -> None:
    made = await complete(client, logprobs=2, stream=stream)
    choices = [e.choices[0] for e in await events(made)] if stream else made.choices
    text = "".join(c.text for c in choices)
    found = [c.logprobs for c in choices if c.logprobs]
    assert "".join(t for f in found for t in f.tokens) == text
    assert all(2 <= len(top) <= 3 for f in found for top in f.top_logprobs)
    named = await complete(client, logprobs=1, extra_body={"return_tokens_as_token_ids": True})
    assert all(t.startswith("token_id:") for t in named.choices[0].logprobs.tokens)


async def test_prompt_log_probabilities_are_told_where_asked_for(client: AsyncOpenAI) -> None:
    choice = (await complete(client, extra_body={"prompt_logprobs": 1, "return_token_ids": True})).choices[0]
    assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids)
    assert choice.prompt_logprobs[0] is None


async def test_completions_are_guided_and_stopped_too(client: AsyncOpenAI) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    made = await complete(client, max_tokens=200, extra_body={"response_format": format_})
    assert set(json.loads(made.choices[0].text)) == {"city", "size"}
    stopped = await complete(client, stop=[" three"], max_tokens=50, extra_body=said("one two three"))
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one two", "stop")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"best_of": 4}, "best_of"),
        ({"suffix": "the end"}, "suffix"),
        ({"extra_body": {"prompt_embeds": "AAAA"}}, "prompt_embeds"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": openai.omit}, "prompt"),
    ],
)
async def test_what_completions_refuse_is_named(client: AsyncOpenAI, options: dict[str, Any], param: str) -> None:
    given = {"model": MODEL, "prompt": "x", **options}
    if given["prompt"] is openai.omit:
        given["prompt"] = None
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**given)
    assert caught.value.param == param
