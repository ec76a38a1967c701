"""Freeform tools in the Responses API: their items and events, their results, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frontend.answer_parts import call, content, say_parts
from tests.support.frontend.fakes import FILES, MODEL, FakeServed, Script
from tests.support.frontend.responses_client import Client
from tests.support.frontend.responses_machine import Machine
from tests.unit.frontend.generation.tools_bench import TOOL_CARD

PATCH = {"type": "custom", "name": "patch", "description": "Change a file."}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
REGEX = {"type": "custom", "name": "code", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
LARK = {"type": "custom", "name": "lark", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
CALLED = say_parts(
    [content("So.")],
    [call(0, '{"inp', name="patch")],
    [call(0, 'ut": "*** \\"x')],
    [call(0, '\\"\\n+a"}'), call(1, "{}", name="f")],
    reason="tool_calls",
)


def serving(script: Script | None = None, **settings: Any) -> Client:
    client = Client(script, **settings)
    client.ingress.models.served[MODEL] = FakeServed(TOOL_CARD, FILES)
    return client


async def test_a_call_is_an_item_of_its_own_with_its_input_as_text() -> None:
    answer = (await serving(CALLED).create(tools=[PATCH, FUNCTION])).json()
    message, custom, function = answer["output"]
    assert message["type"] == "message"
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", '*** "x"\n+a')
    assert (custom["status"], custom["call_id"]) == ("completed", "call_0")
    assert custom["id"].startswith("ctc_")
    assert (function["type"], function["arguments"]) == ("function_call", "{}")
    assert answer["tools"][0] == PATCH


async def test_its_input_is_streamed_as_text() -> None:
    machine = Machine()
    deltas = []
    for event in await serving(CALLED).stream(tools=[PATCH, FUNCTION]):
        machine.take(event)
        if event["type"] == "response.custom_tool_call_input.delta":
            deltas.append(event["delta"])
    assert machine.ended
    assert [item["type"] for item in machine.items] == ["message", "custom_tool_call", "function_call"]
    assert deltas == ['*** "x', '"\n+a']
    assert machine.final["output"] == machine.items


async def test_its_result_is_answered_by_id_and_by_sending_all_items_back() -> None:
    client = serving(CALLED)
    first = (await client.create(input="go", tools=[PATCH, FUNCTION])).json()
    results = [
        {"type": "custom_tool_call_output", "call_id": "call_0", "output": "done"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "also"}]},
    ]
    assert (await client.create(input=results, previous_response_id=first["id"])).status == 200
    by_id = client.prompt()
    assert by_id.endswith("<tool>done</s><tool>also</s><assistant>")
    items = [{"role": "user", "content": "go"}, *first["output"], *results]
    assert (await client.create(input=items)).status == 200
    assert client.prompt() == by_id


async def test_a_choice_names_it() -> None:
    client = serving(CALLED)
    assert (await client.create(tools=[PATCH, FUNCTION], tool_choice={"type": "custom", "name": "patch"})).status == 200
    parse = client.ingress.jobs[-1].generation.parse
    assert parse is not None
    assert parse.choice == {"type": "function", "function": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}
    assert (await client.create(tools=[PATCH, FUNCTION], tool_choice=allowed)).status == 200
    parse = client.ingress.jobs[-1].generation.parse
    assert parse is not None
    assert [tool["function"]["name"] for tool in parse.tools] == ["patch"]


async def test_a_regex_is_enforced_where_a_call_is_forced_and_lark_is_refused_there() -> None:
    client = serving(CALLED)
    assert (await client.create(tools=[REGEX, LARK])).status == 200
    assert (await client.create(tools=[REGEX], tool_choice="required")).status == 200
    parse = client.ingress.jobs[-1].generation.parse
    assert parse is not None
    assert parse.tools[0]["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"
    for choice in ("required", {"type": "custom", "name": "lark"}):
        refused = await client.create(tools=[REGEX, LARK], tool_choice=choice)
        assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter")
        assert refused.error["param"] == "tools[1].format"
        assert "auto" in refused.error["message"]
    assert (await client.create(tools=[REGEX, LARK], tool_choice={"type": "custom", "name": "code"})).status == 200


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search", "web_search_preview", "local_shell", "shell", "file_search", "mcp", "image_generation"),
        *("code_interpreter", "computer_use_preview", "computer", "apply_patch", "tool_search", "web_search_2025_08_26"),
    ],
)
async def test_tools_that_the_server_would_run_are_left_out_or_refused_by_their_type(kind: str) -> None:
    client = serving()
    taken = await client.create(tools=[FUNCTION, {"type": kind}])
    assert (taken.status, taken.headers["headrace-tools-not-offered"]) == (200, kind.removesuffix("_2025_08_26"))
    assert taken.json()["tools"][1] == {"type": kind}
    parse = client.ingress.jobs[-1].generation.parse
    assert parse is not None
    assert len(parse.tools) == 1
    client = serving(hosted_tools="refuse")
    nested = {"type": "namespace", "name": "a", "tools": [FUNCTION, {**FUNCTION, "name": "g"}]}
    refused = await client.create(tools=[nested, {"type": kind}])
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "unsupported_parameter", "tools[1].type")
    assert repr(kind) in refused.error["message"]
    assert not client.ingress.jobs


@pytest.mark.parametrize("kind", ["web_search_call", "local_shell_call", "local_shell_call_output", "mcp_call", "shell_call"])
async def test_items_of_such_tools_are_refused_by_their_type(kind: str) -> None:
    refused = await serving().create(input=[{"role": "user", "content": "x"}, {"type": kind, "id": "a", "call_id": "b"}])
    assert (refused.status, refused.error["param"]) == (400, "input[1].type")
    assert repr(kind) in refused.error["message"]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "bnf"}}]}, "tools[0]"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "y"}}, "tool_choice.custom.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "x", "input": 3}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id"),
    ],
)
async def test_what_is_wrong_is_named(request_: dict[str, Any], param: str) -> None:
    refused = await serving().create(**request_)
    assert (refused.status, refused.error["param"]) == (400, param), refused.body
