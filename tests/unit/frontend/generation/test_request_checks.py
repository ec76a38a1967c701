"""Tools and reasoning in chats: what of a request reaches the template and the worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.frontend.fakes import CARD, FILES, MODEL, FakeServed, chat, frontend, post
from tests.unit.frontend.generation.test_plan import text_of
from tests.unit.frontend.generation.tools_bench import CLOCK, LARK, TEMPLATE, THINKER, TOOL_CARD, WEATHER, ask, job_of, serving

# -- requests ------------------------------------------------------------------------------------------------


CHOICES: list[tuple[dict[str, Any], Any]] = [
    ({}, "auto"),
    ({"tool_choice": "auto"}, "auto"),
    ({"tool_choice": "required"}, "required"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {"type": "function", "function": {"name": "clock"}},
    ),
]


@pytest.mark.parametrize(("wish", "choice"), CHOICES)
async def test_tools_and_choice_reach_the_worker(wish: dict[str, Any], choice: Any) -> None:
    parse = (await job_of(tools=[WEATHER, CLOCK], **wish)).generation.parse
    assert parse is not None
    assert parse.choice == choice
    assert [t["function"]["name"] for t in parse.tools] == ["weather", "clock"]
    assert parse.parallel
    assert parse.whole


async def test_effort_and_kwargs_reach_template_and_parser() -> None:
    card = msgspec.structs.replace(THINKER, template_kwargs={"style": "calm"})
    parse = (await job_of(card, reasoning_effort="none", chat_template_kwargs={"a": 1})).generation.parse
    assert parse is not None
    assert parse.template_kwargs == {"style": "calm", "a": 1, "enable_thinking": False, "reasoning_effort": "none"}
    told = (await job_of(card, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})).generation.parse
    assert told is not None
    assert told.template_kwargs["enable_thinking"] is False


async def test_a_freeform_tool_is_a_function_with_one_text_to_model_and_worker() -> None:
    parse = (await job_of(tools=[WEATHER, LARK], tool_choice="auto")).generation.parse
    assert parse is not None
    function = parse.tools[1]["function"]
    assert (parse.tools[1]["type"], function["name"], function["parameters"]["required"]) == ("function", "patch", ["input"])
    assert 'start: "a"' in function["description"]
    plain = {"type": "custom", "custom": {"name": "say"}}
    named = (await job_of(tools=[plain, LARK], tool_choice=plain)).generation.parse
    assert named is not None
    assert named.choice == {"type": "function", "function": {"name": "say"}}
    allowed = {"mode": "required", "tools": [plain]}
    kept = await job_of(tools=[plain, LARK], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert kept.generation.parse is not None
    assert [tool["function"]["name"] for tool in kept.generation.parse.tools] == ["say"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, {"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools[1].function.parameters"),
    ({"tools": [WEATHER, {"type": "web_surf"}]}, "tools[1].type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [WEATHER, {"type": "custom"}]}, "tools[1].custom"),
    ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]}, "tools[0].custom.format.grammar"),
    ({"tools": [WEATHER, {"type": "custom", "custom": {"name": "weather"}}]}, "tools"),
    ({"tools": [LARK], "tool_choice": "required"}, "tools[0].format"),
    ({"tools": [WEATHER, LARK], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, "tools[1].format"),
    ({"tools": [LARK], "tool_choice": {"type": "function", "function": {"name": "patch"}}}, "tool_choice.function.name"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.custom.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "x"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "x"}}]}]},
        "messages[0].tool_calls[0].custom",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "mcp"}]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("change", "param"), BAD)
async def test_what_is_wrong_with_tools_is_named(change: dict[str, Any], param: str) -> None:
    call, ingress = await ask(**change)
    assert (call.status, call.error["param"]) == (400, param), call.body
    assert not ingress.jobs


async def test_auto_needs_a_parser_and_says_how_to_get_one() -> None:
    call, _ = await ask(CARD, tools=[WEATHER])
    assert (call.status, call.error["code"]) == (400, "no_tool_parser")
    assert "--tool-parser" in call.error["message"]
    assert (await ask(CARD, tools=[WEATHER], tool_choice="required"))[0].status == 200


# -- conversations -------------------------------------------------------------------------------------------


async def messages_seen(messages: list[dict[str, Any]], template: str = TEMPLATE) -> str:
    ingress = serving()
    ingress.models.served[MODEL] = FakeServed(TOOL_CARD, FILES | {"chat_template.jinja": template.encode()})
    call = await post(frontend(ingress).app, chat(messages=messages))
    assert call.status == 200, call.body
    return text_of(ingress.jobs[0].generation.token_ids)


async def test_past_calls_become_objects_and_count() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called, broken], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "cold"}]},
    ]
    text = await messages_seen(history)
    assert '"arguments": {"city": "Oslo"}' in text
    assert '"arguments": {}' in text
    assert '"reasoning": "hm", "reasoning_content": "hm"' in text
    assert '<tool>{"role": "tool", "content": "cold", "tool_call_id": "c1"}' in text
    parse = (await job_of(messages=history, tools=[WEATHER])).generation.parse
    assert parse is not None
    assert parse.calls_before == 2


GENERIC = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWING = GENERIC + "{% if false %}{{ 'developer' }}{% endif %}"
STRICT = "{% for m in messages %}{% if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(("template", "role"), [(KNOWING, "developer"), (GENERIC, "system"), (STRICT, "system")])
async def test_a_developers_words_reach_templates_that_do_not_know_the_role(template: str, role: str) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert await messages_seen(messages, template) == f"<{role}>be brief<user>hi"
