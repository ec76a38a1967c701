"""The `openai` client and the Responses API: real server, two frontends, simulated models whose answers are taken apart."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import ResponseInputMessageItem
from pydantic import BaseModel

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.codex_shape import DEPOT, hermes_call
from tests.support.frontend.open_responses import problems
from tests.support.frontend.responses_machine import Machine
from tests.support.local_deployment import serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/agent"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>The user wants the weather.</think>"


class Weather(BaseModel):
    city: str
    degrees: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(nats_server: EmbeddedServer) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """Of two frontends that share nothing but the server."""
    subjects = Subjects(f"oair{os.getpid()}")
    # what no request prescribes ends soon: a summary has no limit of its own
    model = sim(MODEL, tool_parser="hermes", reasoning_parser="think", args={"mean_output_tokens": 40})
    async with (
        serving(nats_server, subjects, model) as one,
        serving(nats_server, subjects) as two,
        AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as first,
        AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as second,
    ):
        yield first, second


@pytest.fixture
def client(clients: tuple[AsyncOpenAI, AsyncOpenAI]) -> AsyncOpenAI:
    return clients[0]


def asked(answer: str | None = None, **options: Any) -> dict[str, Any]:
    extra = {"vllm_xargs": {"sim_answer": answer}} if answer is not None else {}
    return {"model": MODEL, "input": "Hello?", "temperature": 0, "max_output_tokens": 400, **options, "extra_body": extra}


async def create(client: AsyncOpenAI, answer: str | None = None, **options: Any) -> Any:
    made = await client.responses.create(**asked(answer, **options))
    if not options.get("stream"):
        assert problems(made.to_dict()) == []
    return made


async def test_a_response_has_every_field_the_client_knows(client: AsyncOpenAI) -> None:
    answer = await create(client, "Hello there.", instructions="Be kind.", metadata={"a": "b"}, user="me")
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model, answer.error) == ("response", "completed", MODEL, None)
    assert answer.output_text == "Hello there."
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    assert (answer.instructions, answer.metadata, answer.user) == ("Be kind.", {"a": "b"}, "me")
    assert (answer.parallel_tool_calls, answer.tool_choice, answer.tools) == (True, "auto", [])
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens > 0
    assert usage.input_tokens_details.cached_tokens >= 0


async def test_events_come_in_the_specified_order(client: AsyncOpenAI) -> None:
    machine = Machine()
    stream = await create(client, f"{THOUGHT}Let me look.\n{CALL}", tools=[WEATHER], stream=True)
    async for event in stream:
        machine.take(event.to_dict())
    assert machine.ended
    assert [item["type"] for item in machine.items] == ["reasoning", "message", "function_call"]
    assert json.loads(machine.items[2]["arguments"]) == {"city": "Oslo"}
    assert machine.final["output"] == machine.items


async def test_the_stream_helper_adds_it_up(client: AsyncOpenAI) -> None:
    async with client.responses.stream(**asked("One two three.")) as stream:
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(pieces) == final.output_text == "One two three."
    assert len(pieces) > 1


async def test_reasoning_is_an_item_of_its_own_and_is_counted(client: AsyncOpenAI) -> None:
    answer = await create(client, f"{THOUGHT}Sunny.", reasoning={"effort": "low", "summary": "auto"})
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.summary) == ("reasoning", [])
    assert reasoning.content[0].text == "The user wants the weather."
    assert message.content[0].text == "Sunny."
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert answer.reasoning.effort == "low"


async def test_a_tool_is_called_and_its_result_answered_by_previous_response_id(client: AsyncOpenAI) -> None:
    first = await create(client, f"{THOUGHT}{CALL}", input="The weather in Oslo?", tools=[WEATHER])
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": -3}'}
    second = await create(client, "Minus three.", input=[result], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "Minus three."
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.previous_response_id == first.id


async def test_the_same_by_sending_all_items_back(client: AsyncOpenAI) -> None:
    first = await create(client, f"{THOUGHT}{CALL}", input="The weather in Oslo?", tools=[WEATHER], store=False)
    call = next(item for item in first.output if item.type == "function_call")
    items: list[Any] = [{"role": "user", "content": "The weather in Oslo?"}]
    items += [item.to_dict() for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "-3"})
    second = await create(client, "Minus three.", input=items, tools=[WEATHER], store=False)
    assert second.output_text == "Minus three."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_that_must_be_called_is_called(client: AsyncOpenAI, stream: bool) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        made = await create(client, tools=[WEATHER], tool_choice=choice, stream=stream)
        if stream:
            events = [event async for event in made]
            made = events[-1].response
        (call,) = [item for item in made.output if item.type == "function_call"]
        assert call.name == "weather"
        assert list(json.loads(call.arguments)) == ["city"]


async def test_a_format_is_kept_to(client: AsyncOpenAI) -> None:
    parsed = await client.responses.parse(model=MODEL, input="The weather?", text_format=Weather, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Weather)
    async with client.responses.stream(model=MODEL, input="The weather?", text_format=Weather, max_output_tokens=400) as stream:
        final = await stream.get_final_response()
    assert isinstance(final.output_parsed, Weather)
    free = await create(client, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(free.output_text), dict)


async def test_an_answer_that_was_cut_is_incomplete(client: AsyncOpenAI) -> None:
    answer = await create(client, "One two three four five.", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = [event async for event in await create(client, "One two three.", max_output_tokens=3, stream=True)]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage.output_tokens == 3


async def test_log_probabilities_come_with_the_text(client: AsyncOpenAI) -> None:
    answer = await create(client, "Hi.", include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == "Hi."
    assert all(len(entry.top_logprobs) <= 2 for entry in logprobs)
    thinking = await create(client, f"{THOUGHT}Hi.", include=["message.output_text.logprobs"])
    assert [entry.token for entry in thinking.output[1].content[0].logprobs] == [entry.token for entry in logprobs]


async def test_any_frontend_answers_for_what_another_has_stored(clients: tuple[AsyncOpenAI, AsyncOpenAI]) -> None:
    one, two = clients
    first = await create(one, "I am one.", input="Who are you?")
    stored = await two.responses.retrieve(first.id)
    assert stored.to_dict() == first.to_dict()
    second = await create(two, "Still one.", input="And now?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    items = await one.responses.input_items.list(second.id, order="asc")
    (item,) = items.data
    assert isinstance(item, ResponseInputMessageItem)
    assert [part.to_dict()["text"] for part in item.content] == ["And now?"]
    reference: Any = [{"type": "item_reference", "id": item.id}]
    assert (await create(two, "Yes.", input=reference)).status == "completed"
    await two.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await one.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="is not stored"):
        await create(one, "?", previous_response_id=second.id)


async def test_a_long_conversation_is_continued_turn_by_turn_and_its_prefix_reused(
    clients: tuple[AsyncOpenAI, AsyncOpenAI],
) -> None:
    previous: str | None = None
    cached, inputs = [], []
    for turn in range(20):
        options: Any = {"previous_response_id": previous} if previous else {}
        answer = await create(clients[turn % 2], f"This is answer number {turn}.", input=f"Question {turn}?", **options)
        previous = answer.id
        cached.append(answer.usage.input_tokens_details.cached_tokens)
        inputs.append(answer.usage.input_tokens)
    assert inputs == sorted(set(inputs))
    assert cached[1:] == sorted(cached[1:])
    assert cached[-1] > 0.8 * inputs[-1]


async def test_what_goes_in_is_counted(client: AsyncOpenAI) -> None:
    made = await create(client, "x", input="How long am I?", tools=[WEATHER], instructions="Be kind.")
    counted = await client.responses.input_tokens.count(
        model=MODEL, input="How long am I?", tools=[WEATHER], instructions="Be kind."
    )
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    follow = await client.responses.input_tokens.count(model=MODEL, input="And I?", previous_response_id=made.id)
    assert follow.input_tokens > 0


async def test_a_freeform_tool_is_called_with_plain_text(client: AsyncOpenAI) -> None:
    patch: Any = {"type": "custom", "name": "patch", "description": "Changes a file."}
    text = '*** "Begin"\n+a\\b\n'
    answer = f"<tool_call>{json.dumps({'name': 'patch', 'arguments': {'input': text}})}</tool_call>"
    machine = Machine()
    async for event in await create(client, answer, tools=[patch, WEATHER], stream=True):
        machine.take(event.to_dict())
    (item,) = machine.items
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    result: Any = [{"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}]
    again = await create(client, "Good.", input=result, previous_response_id=machine.final["id"], tools=[patch])
    assert again.output_text == "Good."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_of_a_namespace_is_called_and_its_result_answered(client: AsyncOpenAI, stream: bool) -> None:
    began: list[tuple[str | None, str]] = []

    async def turn(answer: str, **options: Any) -> Any:
        made = await create(client, answer, tools=[WEATHER, DEPOT, {"type": "web_search"}], stream=stream, **options)
        if not stream:
            return made
        machine = Machine()
        async for event in made:
            machine.take(event.to_dict())
            if event.type == "response.output_item.added" and event.item.type != "message":
                began.append((event.item.namespace, event.item.name))
        return event.response

    calls = hermes_call("mcp__depot__stock", article="nail") + hermes_call("mcp__depot__note", input="7 nails") + CALL
    first = await turn(calls, input="How many nails?")
    stock, note, weather = first.output
    assert (stock.type, stock.namespace, stock.name) == ("function_call", "mcp__depot", "stock")
    assert json.loads(stock.arguments) == {"article": "nail"}
    assert (note.type, note.namespace, note.name, note.input) == ("custom_tool_call", "mcp__depot", "note", "7 nails")
    assert (weather.type, weather.namespace, weather.name) == ("function_call", None, "weather")
    assert began == ([(item.namespace, item.name) for item in first.output] if stream else [])
    stored = await client.responses.retrieve(first.id)
    assert stored.output == first.output
    results = [
        {"type": "function_call_output", "call_id": stock.call_id, "output": "7"},
        {"type": "custom_tool_call_output", "call_id": note.call_id, "output": "written"},
        {"type": "function_call_output", "call_id": weather.call_id, "output": "-3"},
    ]
    asked = {"role": "user", "content": "How many nails?"}
    sent_back = [asked, *(item.to_dict() for item in first.output), *results]
    second = await turn("Seven.", input=results, previous_response_id=first.id)
    same = await turn("Seven.", input=sent_back)
    assert second.output_text == same.output_text == "Seven."
    assert second.usage.input_tokens == same.usage.input_tokens


async def test_a_conversation_is_compacted(client: AsyncOpenAI) -> None:
    first = await create(client, "I am a machine.", input="My name is Alice.")
    short = await client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert (short.object, [item.type for item in short.output]) == ("response.compaction", ["message", "compaction"])
    assert short.usage.output_tokens > 0
    kept: Any = short.to_dict(warnings=False)["output"]  # the package has no type for messages of the user there
    items: Any = [*kept, {"role": "user", "content": "Who am I?"}]
    assert (await create(client, "Alice.", input=items)).output_text == "Alice."


REFUSED: list[dict[str, Any]] = [
    {"tools": [{"type": "web_surf"}]},
    {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
]


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: next(iter(options)))
async def test_what_is_not_done_is_refused_by_name(client: AsyncOpenAI, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client, "x", **options)
    assert caught.value.code == "unsupported_parameter"
    assert next(iter(options)) in str(caught.value.param)


async def test_only_what_is_made_in_the_background_is_cancelled(client: AsyncOpenAI) -> None:
    made = await create(client, "x")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(made.id)


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="acme/agent"):
        await create(client, "x", model="nobody")
