"""Requests of the Messages API as chat requests: what becomes of blocks, tools and options, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.frontend.anthropic.schema import MessagesRequest
from headrace.frontend.anthropic.translate import chat_request
from headrace.frontend.chat_schema import ChatRequest
from tests.support.frontend.anthropic_client import Client
from tests.support.frontend.fakes import FILES, Call, FakeServed

TOOL = {"name": "f", "description": "d", "input_schema": {"properties": {}}, "cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "hi"}


def chat_of(*, strip: bool = True, merge: bool = False, **request: Any) -> ChatRequest:
    whole = msgspec.convert({"model": "m", "max_tokens": 4096, "messages": [USER], **request}, MessagesRequest)
    return chat_request(whole, strip_billing=strip, merge_system=merge)


def test_blocks_become_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is 1+1?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Easy.", "signature": "s"},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "3", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c3"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert chat_of(messages=messages, system=system).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {
            "role": "assistant",
            "reasoning_content": "Easy.",
            "content": "One moment.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "And?"},
    ]


def test_a_tool_that_the_client_has_found_is_named_to_the_model() -> None:
    found = {"type": "tool_reference", "tool_name": "mcp__depot__stock"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [found]}
    assert chat_of(messages=[{"role": "user", "content": [result]}]).messages == [
        {"role": "tool", "tool_call_id": "c", "content": "The tool mcp__depot__stock can be called now."}
    ]


def test_images_are_handed_on_as_the_chat_api_has_them() -> None:
    bytes_ = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [bytes_]}
    messages = chat_of(messages=[{"role": "user", "content": [url, {"type": "text", "text": "?"}, result]}]).messages
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    assert messages == [
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": [inline]},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}, {"type": "text", "text": "?"}],
        },
    ]


def test_the_billing_line_is_dropped_from_system_prompts_unless_told_otherwise() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=4f2a1;"
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "You are an agent."}]
    assert chat_of(system=blocks).messages[0] == {"role": "system", "content": "You are an agent."}
    assert chat_of(system=f"{line}\nYou are.").messages[0] == {"role": "system", "content": "You are."}
    assert chat_of(system=line).messages == [USER]
    assert chat_of(system=blocks, strip=False).messages[0]["content"] == f"{line}You are an agent."


def test_options_go_where_the_chat_api_has_them() -> None:
    chat = chat_of(
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        metadata={"user_id": "user_1_session_2"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert chat.tools is not None
    function = chat.tools[0].function
    assert function is not None
    assert (function.name, function.description, function.parameters) == ("f", "d", {"properties": {}, "type": "object"})
    assert not isinstance(chat.tool_choice, str)
    assert chat.tool_choice is not None
    assert chat.tool_choice.function is not None
    assert chat.tool_choice.function.name == "f"
    assert chat.parallel_tool_calls is False
    assert (chat.stop, chat.temperature, chat.top_p, chat.top_k) == (["END"], 0.0, 0.5, 3)
    assert chat.session_id == "user_1_session_2"
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert chat.thinking_token_budget == 1024
    assert chat.reasoning_effort == "low"
    assert chat.response_format is not None
    assert chat.response_format.type == "json_schema"


@pytest.mark.parametrize(("given", "choice"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices_have_other_names(given: str, choice: str) -> None:
    assert chat_of(tools=[TOOL], tool_choice={"type": given}).tool_choice == choice


def test_thinking_is_left_to_the_template_unless_the_request_says() -> None:
    assert chat_of().chat_template_kwargs is None
    assert chat_of(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    kwargs = chat_of(thinking={"type": "adaptive"}, chat_template_kwargs={"thinking": "deep"}).chat_template_kwargs
    assert kwargs == {"enable_thinking": True, "thinking": "deep"}


def test_an_answer_the_client_has_begun_is_continued() -> None:
    chat = chat_of(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert chat_of().continue_final_message is None


def test_system_messages_among_the_others_stay_there_or_go_to_the_first() -> None:
    messages = [USER, {"role": "system", "content": "Remember."}, USER]
    assert [m["role"] for m in chat_of(messages=messages, system="Be brief.").messages] == ["system", "user", "system", "user"]
    merged = chat_of(messages=messages, system="Be brief.", merge=True).messages
    assert [(m["role"], m["content"]) for m in merged[:2]] == [("system", "Be brief.Remember."), ("user", "hi")]


async def test_a_template_that_takes_system_messages_at_the_start_only_gets_them_there() -> None:
    client = Client()
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    served = client.ingress.models.served
    for name, one in list(served.items()):
        served[name] = FakeServed(one.card, {**FILES, "chat_template.jinja": strict.encode()})
    answer = await client.create(messages=[USER, {"role": "system", "content": "Remember."}])
    assert answer.status == 200, answer.body
    assert client.prompt() == "<system>Remember.<user>hi"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        "messages[0].content[0].source.type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]}]},
        "messages[0].content[0].source.type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]}, "messages[0].content[0].name"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "x"}]}]},
        "messages[0].content[0].input",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"type": "web_surf_20250305", "name": "web_surf"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"stop_sequences": [""]}, "stop_sequences"),
]


@pytest.mark.parametrize(("request_", "param"), WRONG, ids=[f"{i}-{param}" for i, (_, param) in enumerate(WRONG)])
async def test_what_is_wrong_or_not_done_is_refused_by_name(request_: dict[str, Any], param: str) -> None:
    answer = await Client().create(**request_)
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


async def test_counting_gives_the_tokens_of_the_prompt_even_where_it_is_too_long() -> None:
    client = Client()
    await client.create(system="Be brief.")
    count = await client.create("/v1/messages/count_tokens", system="Be brief.")
    assert count.json() == {"input_tokens": client.ingress.jobs[0].prompt_tokens}
    long = await client.create("/v1/messages/count_tokens", messages=[{"role": "user", "content": "x" * 1000}])
    assert (long.status, long.json()["input_tokens"] > 1000) == (200, True)
    assert len(client.ingress.jobs) == 1  # nothing was run for it


async def test_a_tool_of_anthropics_servers_is_left_out_and_reported() -> None:
    client = Client()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):  # counting tokens raises no counter
        answer = await client.create(path, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        assert (answer.status, answer.headers["headrace-tools-not-offered"]) == (200, "web_search")
    counted = (await Call(client.frontend.app, "/metrics", method="GET").run()).body.decode()
    assert 'headrace_frontend_tools_not_offered_total{kind="web_search"} 1.0' in counted
