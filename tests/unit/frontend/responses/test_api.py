"""Requests of the Responses API as chat requests: what becomes of items, tools and options, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.frontend.responses.api import chat_request, messages_of, placed
from headrace.frontend.responses.schema import ResponsesRequest
from headrace.frontend.responses.toolset import toolset_of
from tests.support.frontend.responses_client import Client

FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def chat_of(**request: Any) -> Any:
    whole = msgspec.convert({"model": "m", "input": "hi", **request}, ResponsesRequest)
    items = [{"role": "user", "content": whole.input}] if isinstance(whole.input, str) else whole.input
    toolset = toolset_of(whole.tools, placed((), items))
    return chat_request(whole, messages_of(whole.instructions, [], items, toolset), toolset)


def test_items_of_one_go_become_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 1+1?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Easy."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "One moment.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"type": "message", "role": "assistant", "content": "Two."},
    ]
    assert messages_of("Be brief.", [], items) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {
            "role": "assistant",
            "reasoning_content": "Easy.",
            "content": [{"type": "text", "text": "One moment."}],
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "Two."},
    ]


def test_what_follows_calls_without_their_results_is_a_message_of_its_own() -> None:
    items: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"role": "assistant", "content": "Waiting."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    ]
    assert [sorted(message) for message in messages_of(None, [], items)] == [
        ["role", "tool_calls"],
        ["content", "role"],
        ["reasoning_content", "role"],
    ]


def test_images_are_handed_on_as_the_chat_api_has_them() -> None:
    part = {"type": "input_image", "image_url": "https://x/y.png", "detail": "low"}
    (message,) = messages_of(None, [], [{"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}])
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}},
        {"type": "text", "text": "?"},
    ]


def test_options_go_where_the_chat_api_has_them() -> None:
    chat = chat_of(
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        temperature=0.0,
        top_p=0.5,
        prompt_cache_key="k",
        service_tier="priority",
        truncation="auto",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        top_k=5,
        stop=["x"],
        seed=1,
    )
    (tool,) = chat.tools
    assert (tool.function.name, tool.function.description, tool.function.strict) == ("f", "d", True)
    assert chat.tool_choice.function.name == "f"
    assert chat.parallel_tool_calls is False
    assert chat.response_format.json_schema.schema == {"type": "object"}
    assert chat.reasoning_effort == "low"
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed, chat.stop) == (0.0, 0.5, 5, 1, ["x"])
    assert (chat.session_id, chat.service_tier, chat.truncate_prompt_tokens) == ("k", "priority", -1)
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)


def test_allowed_tools_keep_their_mode() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    chat = chat_of(tools=[FUNCTION], tool_choice=choice)
    assert chat.tool_choice.allowed_tools.mode == "required"
    assert [tool.function.name for tool in chat.tool_choice.allowed_tools.tools] == ["f"]


def test_a_json_object_is_asked_for_as_in_chat() -> None:
    assert chat_of(text={"format": {"type": "json_object"}}).response_format.type == "json_object"
    assert chat_of(text={"format": {"type": "text"}}).response_format is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"background": True, "store": False}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"tools": [{"type": "web_surf"}]}, "tools[0].type"),
    ({"tools": [FUNCTION, {"type": "mcp_2", "server_label": "x"}]}, "tools[1].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ({"include": ["everything"]}, "include[0]"),
    ({"stream_options": {}}, "stream_options"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": 3}]}, "input[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": {}}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0].file_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"previous_response_id": "resp_gone"}, "previous_response_id"),
]


@pytest.mark.parametrize(("request_", "param"), WRONG, ids=[f"{i}-{param}" for i, (_, param) in enumerate(WRONG)])
async def test_what_is_wrong_or_not_done_is_refused_by_name(request_: dict[str, Any], param: str) -> None:
    answer = await Client().create(**request_)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert answer.error["message"]


async def test_an_answer_that_was_cut_is_continued() -> None:
    client = Client()
    begun = {
        "type": "message",
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "The"}],
    }
    assert (await client.create(input=[{"role": "user", "content": "hi"}, begun])).status == 200
    assert client.prompt().endswith("<assistant>The")
    await client.create(input=[{"role": "user", "content": "hi"}, {**begun, "status": "completed"}])
    assert client.prompt().endswith("<assistant>The</s><assistant>")


async def test_a_prompt_that_is_too_long_blames_the_input() -> None:
    answer = await Client().create(input="x" * 1000)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", "input")


async def test_counting_gives_the_tokens_of_the_prompt_even_where_it_is_too_long() -> None:
    client = Client()
    await client.create(input="hello", instructions="Be brief.")
    for text, tokens in (("hello", client.ingress.jobs[0].prompt_tokens), ("x" * 1000, 1000)):
        body = {"model": "org/tiny", "input": text, "instructions": "Be brief."}
        answer = await client.call("POST", "/v1/responses/input_tokens", body)
        assert answer.status == 200, answer.body
        assert answer.json()["object"] == "response.input_tokens"
        assert answer.json()["input_tokens"] >= tokens
    assert len(client.ingress.jobs) == 1  # nothing was run for it
