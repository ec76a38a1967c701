"""The `openai` client over stored chat completions and conversations: a real server, two frontends, a simulated model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/keeper"
Clients = tuple[AsyncOpenAI, AsyncOpenAI]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(nats_server: EmbeddedServer) -> AsyncIterator[Clients]:
    """Of two frontends that share nothing but the server."""
    subjects = Subjects(f"oaik{os.getpid()}")
    async with (
        serving(nats_server, subjects, sim(MODEL, tool_parser="hermes")) as one,
        serving(nats_server, subjects) as two,
        AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as first,
        AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as second,
    ):
        yield first, second


def tenant(client: AsyncOpenAI, name: str) -> AsyncOpenAI:
    return client.with_options(default_headers={"x-headrace-tenant": name})


async def chat(client: AsyncOpenAI, text: str, **options: Any) -> Any:
    body = {"vllm_xargs": {"sim_answer": f"You said {text}."}}
    messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]
    return await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=60, store=True, extra_body=body, **options
    )


async def test_completions_are_stored_listed_changed_and_deleted_through_any_frontend(clients: Clients) -> None:
    one, two = (tenant(client, "keeping") for client in clients)
    first = await chat(one, "one", metadata={"kind": "odd"})
    stream = await chat(two, "two", metadata={"kind": "even"}, stream=True)
    chunks = [chunk async for chunk in stream]
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    found = await two.chat.completions.retrieve(first.id)
    assert found.choices[0].message.content == first.choices[0].message.content == "You said one."
    assert found.metadata == {"kind": "odd"}
    other = await one.chat.completions.retrieve(chunks[0].id)
    assert other.choices[0].message.content == streamed == "You said two."
    assert other.usage is not None
    assert other.usage.completion_tokens > 0
    listed = [completion.id async for completion in two.chat.completions.list(limit=1, order="asc")]
    assert set(listed) == {first.id, other.id}
    (even,) = (await one.chat.completions.list(metadata={"kind": "even"}, model=MODEL)).data
    assert even.id == other.id
    assert (await one.chat.completions.list(model="another")).data == []
    changed = await two.chat.completions.update(first.id, metadata={"kind": "first"})
    assert changed.metadata == (await one.chat.completions.retrieve(first.id)).metadata == {"kind": "first"}
    messages = [message async for message in one.chat.completions.messages.list(first.id, limit=1)]
    assert [(message.role, message.content) for message in messages] == [("system", "Be kind."), ("user", "one")]
    for name in (first.id, other.id):
        assert (await two.chat.completions.delete(name)).deleted
        with pytest.raises(openai.NotFoundError):
            await one.chat.completions.retrieve(name)
    assert (await one.chat.completions.list()).data == []


async def test_conversations_are_kept_by_client_and_responses_through_any_frontend(clients: Clients) -> None:
    one, two = clients
    conversation = await one.conversations.create(
        metadata={"topic": "names"}, items=[{"type": "message", "role": "user", "content": "I am Alice."}]
    )
    assert (await two.conversations.retrieve(conversation.id)).metadata == {"topic": "names"}
    assert (await two.conversations.update(conversation.id, metadata={"topic": "b"})).metadata == {"topic": "b"}
    body = {"vllm_xargs": {"sim_answer": "Alice."}}
    asked: dict[str, Any] = {"model": MODEL, "conversation": conversation.id, "max_output_tokens": 60, "extra_body": body}
    answer = await two.responses.create(input="Who am I?", **asked)
    assert answer.conversation is not None
    assert answer.conversation.id == conversation.id
    again = await one.responses.create(input="Sure?", **asked)
    assert again.usage is not None
    assert answer.usage is not None
    assert again.usage.input_tokens > answer.usage.input_tokens
    added = await two.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "Thanks."}]
    )
    items: list[Any] = [item async for item in one.conversations.items.list(conversation.id, order="asc", limit=2)]
    said = [item.content[0].text for item in items]
    assert said == ["I am Alice.", "Who am I?", "Alice.", "Sure?", "Alice.", "Thanks."]
    assert items[2].id == answer.output[0].id
    one_item: Any = await two.conversations.items.retrieve(items[1].id, conversation_id=conversation.id)
    assert one_item.content[0].text == "Who am I?"
    await one.conversations.items.delete(added.data[0].id, conversation_id=conversation.id)
    assert len((await two.conversations.items.list(conversation.id)).data) == 5
    assert (await two.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await one.responses.create(input="?", **asked)


async def test_responses_of_two_frontends_at_once_are_both_added(clients: Clients) -> None:
    conversation = await clients[0].conversations.create()

    async def ask(i: int) -> None:
        body = {"vllm_xargs": {"sim_answer": f"Answer {i}."}}
        await clients[i % 2].responses.create(
            model=MODEL, input=f"Question {i}?", conversation=conversation.id, max_output_tokens=60, extra_body=body
        )

    await asyncio.gather(*(ask(i) for i in range(6)))
    items: list[Any] = [item async for item in clients[1].conversations.items.list(conversation.id, order="asc")]
    said = [item.content[0].text for item in items]
    pairs = sorted(zip(said[::2], said[1::2], strict=True))
    assert pairs == [(f"Question {i}?", f"Answer {i}.") for i in range(6)]
    await clients[0].conversations.delete(conversation.id)


async def test_a_tenant_sees_only_its_own(clients: Clients) -> None:
    mine, theirs = tenant(clients[0], "mine"), tenant(clients[1], "theirs")
    made = await chat(mine, "secret")
    conversation = await mine.conversations.create(metadata={"a": "b"})
    with pytest.raises(openai.NotFoundError):
        await theirs.chat.completions.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await theirs.conversations.retrieve(conversation.id)
    assert (await theirs.chat.completions.list()).data == []
    await mine.chat.completions.delete(made.id)
    await mine.conversations.delete(conversation.id)
