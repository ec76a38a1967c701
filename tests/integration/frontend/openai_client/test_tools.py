"""The `openai` client with tools and reasoning: simulated answers, taken apart by the built-in parsers."""

from __future__ import annotations

import json
import os
import re
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

MODEL = "acme/agent"
HI: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>The user wants the weather.</think>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: EmbeddedServer) -> AsyncIterator[AsyncOpenAI]:
    model = sim(MODEL, tool_parser="hermes", reasoning_parser="think")
    async with (
        serving(nats_server, Subjects(f"oait{os.getpid()}"), model) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


async def ask(client: AsyncOpenAI, answer: str | None = None, **options: Any) -> Any:
    extra = {**options.pop("extra_body", {}), **({"vllm_xargs": {"sim_answer": answer}} if answer is not None else {})}
    given = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 400, **options}
    return await client.chat.completions.create(**given, extra_body=extra)


class Read:
    """A whole answer, or what a stream adds up to."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: dict[int, list[Any]] = {}
        self.finish: str | None = None
        self.pieces = 0  # events with arguments in them

    @property
    def functions(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls.values()]


async def read(made: Any, *, stream: bool) -> Read:
    out = Read()
    if not stream:
        message = made.choices[0].message
        out.content, out.reasoning = message.content or "", getattr(message, "reasoning_content", None) or ""
        out.calls = {i: [c.id, c.function.name, c.function.arguments] for i, c in enumerate(message.tool_calls or [])}
        out.finish = made.choices[0].finish_reason
        return out
    async for event in made:
        for choice in event.choices:
            delta = choice.delta
            out.content += delta.content or ""
            out.reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                entry = out.calls.setdefault(call.index, [None, None, ""])
                assert call.id is None or (entry[0] is None and call.type == "function"), "an id comes once"
                entry[0], entry[1] = entry[0] or call.id, entry[1] or call.function.name
                entry[2] += call.function.arguments or ""
                out.pieces += bool(call.function.arguments)
            out.finish = choice.finish_reason or out.finish
    return out


STREAM = pytest.mark.parametrize("stream", [False, True])


@STREAM
async def test_a_call_is_found_in_the_answer(client: AsyncOpenAI, stream: bool) -> None:
    said = await read(await ask(client, CALL, tools=[WEATHER], stream=stream), stream=stream)
    assert said.functions == [("weather", {"city": "Oslo"})]
    assert (said.content.strip(), said.finish) == ("", "tool_calls")
    assert all(call[0] for call in said.calls.values())


@STREAM
async def test_thoughts_words_and_calls_are_told_apart(client: AsyncOpenAI, stream: bool) -> None:
    answer = f"{THOUGHT}Let me look.\n{CALL}\n{SECOND}"
    said = await read(await ask(client, answer, tools=[WEATHER, CLOCK], stream=stream), stream=stream)
    assert said.reasoning == "The user wants the weather."
    assert said.content.strip() == "Let me look."
    assert said.functions == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert len({call[0] for call in said.calls.values()}) == 2
    assert said.finish == "tool_calls"


async def test_arguments_are_streamed_in_pieces(client: AsyncOpenAI) -> None:
    long = CALL.replace("Oslo", "Oslo in the south of Norway, by the fjord")
    said = await read(await ask(client, long, tools=[WEATHER], stream=True), stream=True)
    assert said.pieces > 3


@STREAM
async def test_without_calls_the_answer_is_text(client: AsyncOpenAI, stream: bool) -> None:
    said = await read(await ask(client, "It is cold.", tools=[WEATHER], stream=stream), stream=stream)
    assert (said.content, said.calls, said.finish) == ("It is cold.", {}, "stop")


@STREAM
async def test_a_call_can_be_required(client: AsyncOpenAI, stream: bool) -> None:
    made = await ask(client, tools=[WEATHER, CLOCK], tool_choice="required", stream=stream)
    said = await read(made, stream=stream)
    assert said.functions
    assert {name for name, _ in said.functions} <= {"weather", "clock"}
    assert said.finish == "tool_calls"


@STREAM
async def test_a_tool_can_be_named(client: AsyncOpenAI, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    said = await read(await ask(client, tools=[WEATHER, CLOCK], tool_choice=choice, stream=stream), stream=stream)
    ((name, arguments),) = said.functions
    assert name == "weather"
    assert isinstance(arguments["city"], str)
    assert said.finish == "stop"  # as OpenAI and vLLM have it


@STREAM
async def test_one_call_at_a_time_when_asked_for(client: AsyncOpenAI, stream: bool) -> None:
    made = await ask(client, f"{CALL}\n{SECOND}", tools=[WEATHER, CLOCK], parallel_tool_calls=False, stream=stream)
    assert len((await read(made, stream=stream)).calls) == 1


@STREAM
async def test_choice_none_leaves_marks_alone(client: AsyncOpenAI, stream: bool) -> None:
    said = await read(await ask(client, CALL, tools=[WEATHER], tool_choice="none", stream=stream), stream=stream)
    assert said.calls == {}
    assert "tool_call" in said.content


@STREAM
async def test_reasoning_is_split_off_without_tools(client: AsyncOpenAI, stream: bool) -> None:
    said = await read(await ask(client, f"{THOUGHT}Cold.", stream=stream), stream=stream)
    assert (said.reasoning, said.content, said.finish) == ("The user wants the weather.", "Cold.", "stop")


@STREAM
async def test_reasoning_can_be_left_out(client: AsyncOpenAI, stream: bool) -> None:
    made = await ask(client, f"{THOUGHT}Cold.", stream=stream, extra_body={"include_reasoning": False})
    said = await read(made, stream=stream)
    assert (said.reasoning, said.content) == ("", "Cold.")


async def test_thinking_is_counted(client: AsyncOpenAI) -> None:
    details = (await ask(client, f"{THOUGHT}Cold.")).usage.completion_tokens_details
    assert details.reasoning_tokens > 0
    options: Any = {"include_usage": True}
    stream = [e async for e in await ask(client, f"{THOUGHT}Cold.", stream=True, stream_options=options)]
    assert stream[-1].usage.completion_tokens_details == details


async def test_a_conversation_goes_on_after_a_call(client: AsyncOpenAI) -> None:
    first = await ask(client, CALL, tools=[WEATHER])
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"degrees": -3}'}
    history = [*HI, message.model_dump(exclude_none=True), result]
    answer = await ask(client, "It is three below.", messages=history, tools=[WEATHER])
    assert answer.choices[0].message.content == "It is three below."
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens


async def test_the_clients_own_stream_helper_agrees(client: AsyncOpenAI) -> None:
    body = {"vllm_xargs": {"sim_answer": CALL}}
    async with client.chat.completions.stream(model=MODEL, messages=HI, tools=[WEATHER], extra_body=body) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}


PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Change a file."}}
CODE: Any = {
    "type": "custom",
    "custom": {
        "name": "code",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[A-Z]{3}-[0-9]{4}"}},
    },
}


async def test_a_freeform_tool_is_called_with_plain_text_and_its_result_answered(client: AsyncOpenAI) -> None:
    text = 'a "quoted" line\n\tand\\another'
    arguments = json.dumps({"name": "patch", "arguments": {"input": text}})
    answer = f"<tool_call>\n{arguments}\n</tool_call>"
    made = await ask(client, answer, tools=[PATCH, WEATHER])
    (call,) = made.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", text)
    stream = await ask(client, answer, tools=[PATCH, WEATHER], stream=True)
    pieces = [p.model_extra["custom"] async for c in stream for p in c.choices[0].delta.tool_calls or ()]
    assert "".join(piece["input"] for piece in pieces) == text
    assert len(pieces) > 2
    history = [*HI, made.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    again = await ask(client, "Done.", tools=[PATCH], messages=history)
    assert again.choices[0].message.content == "Done."


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "code"}}])
async def test_a_forced_freeform_call_keeps_to_its_regex(client: AsyncOpenAI, choice: Any) -> None:
    made = await ask(client, tools=[CODE], tool_choice=choice)
    calls = made.choices[0].message.tool_calls
    assert calls
    assert all(re.fullmatch("[A-Z]{3}-[0-9]{4}", call.custom.input) for call in calls)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "web_surf"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    ],
)
async def test_what_is_wrong_is_named(client: AsyncOpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, **options)
    assert caught.value.param == param
