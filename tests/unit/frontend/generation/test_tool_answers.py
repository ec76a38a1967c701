"""Answers with calls and reasoning: what parts look like to the client, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.broker.messages.frames import Part
from headrace.broker.models.cards import ModelCard
from tests.unit.frontend.generation.tools_bench import CLOCK, LARK, THINKER, WEATHER, ask, parts, tool


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_freeform_tool_has_its_input_as_text(stream: bool) -> None:
    said = parts(
        [tool('{"inp', 0, "c0", "patch")], [tool('ut":"a\\', 0)], [tool('nb"}', 0)], [tool("{}", 1, "c1", "weather")],
        reason="tool_calls",
    )  # fmt: skip
    call, _ = await ask(script=said, tools=[WEATHER, LARK], stream=stream)
    assert call.status == 200, call.body
    if not stream:
        ChatCompletion.model_validate(call.json())
        calls = call.json()["choices"][0]["message"]["tool_calls"]
        assert calls[0] == {"type": "custom", "id": "c0", "custom": {"name": "patch", "input": "a\nb"}}
        assert calls[1] == {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": "{}"}}
        return
    deltas = [event["choices"][0]["delta"] for event in call.events() if event != "[DONE]"]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0] == {"index": 0, "id": "c0", "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert "".join(piece["custom"]["input"] for piece in pieces[:-1]) == "a\nb"
    assert pieces[-1]["function"] == {"name": "weather", "arguments": "{}"}


CALLING: tuple[list[Part], ...] = (
    [Part("reasoning", "let me ")],
    [Part("reasoning", "see"), Part("content", "Well")],
    [],
    [Part("content", ".")],
    [tool(call="call-1", name="weather")],
    [tool('{"city":')],
    [tool('"Oslo"}'), tool("", 1, "call-2", "clock")],
    [tool("{}", 1)],
)


async def whole(script: Any, card: ModelCard = THINKER, **body: Any) -> Any:
    call, _ = await ask(card, script, **({"tools": [WEATHER, CLOCK]} | body))
    assert call.status == 200, call.body
    ChatCompletion.model_validate(call.json())
    return call.json()


async def streamed(script: Any, card: ModelCard = THINKER, **body: Any) -> list[Any]:
    call, _ = await ask(card, script, stream=True, **({"tools": [WEATHER, CLOCK]} | body))
    assert call.status == 200, call.body
    events = call.events()
    assert events.pop() == "[DONE]"
    return events


async def test_parts_become_the_message() -> None:
    answer = await whole(parts(*CALLING, reason="tool_calls", reasoning_tokens=2))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Well."
    assert message["reasoning"] == message["reasoning_content"] == "let me see"
    assert message["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
        {"id": "call-2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_the_stream_says_the_same_as_the_whole_answer() -> None:
    script = parts(*CALLING, reason="tool_calls")
    events = await streamed(script)
    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    message = state.get_final_completion().choices[0].message
    expected = (await whole(script))["choices"][0]["message"]
    assert message.content == expected["content"]
    assert message.tool_calls is not None
    calls = [(c.id, c.type, c.function.name, c.function.arguments) for c in message.tool_calls]
    assert calls == [(c["id"], c["type"], c["function"]["name"], c["function"]["arguments"]) for c in expected["tool_calls"]]
    said = [e["choices"][0]["delta"] for e in events]
    assert "".join(d.get("reasoning_content", "") for d in said) == expected["reasoning_content"]
    assert "".join(d.get("reasoning", "") for d in said) == expected["reasoning"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_hidden_reasoning_is_not_given_away_by_its_tokens(stream: bool) -> None:
    body: dict[str, Any] = {"logprobs": True, "return_token_ids": True, "include_reasoning": False}
    script = parts([], [Part("content", "hi")], logprobs=True)
    answers = await streamed(script, **body) if stream else [await whole(script, **body)]
    choices = [c for answer in answers for c in answer["choices"]]
    assert all(c["logprobs"] is None and "token_ids" not in c for c in choices)


async def test_an_echoed_message_comes_before_the_answer() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am "}]
    body: dict[str, Any] = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    answer = await whole(parts([Part("content", "here")]), **body)
    assert answer["choices"][0]["message"]["content"] == "I am here"
    events = await streamed(parts([Part("content", "here")]), **body)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "I am here"
    other = await whole(parts([Part("content", "here")]), echo=True)
    assert other["choices"][0]["message"]["content"] == "here"
