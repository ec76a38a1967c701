"""Tools in namespaces and tool search: what the model is offered, and what the client gets back and may send again."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace.broker.jobs import Job
from headrace.frontend.responses.toolset import MAX_NAME, Toolset, flat_name, toolset_of
from tests.support.frontend.answer_parts import call, say_parts
from tests.support.frontend.codex_shape import DEPOT, codex_turn
from tests.support.frontend.fakes import CARD, FILES, MODEL, FakeServed, Script
from tests.support.frontend.responses_client import Client
from tests.support.frontend.responses_machine import Machine
from tests.unit.frontend.generation.tools_bench import TEMPLATE

CODER = msgspec.structs.replace(CARD, tool_parser="hermes", context_length=32_768)


def function(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]}
    return {"type": "function", "name": name, "description": f"{name} does it.", "parameters": parameters, **more}


def space(name: str, *tools: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": description, "tools": list(tools)}


SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}


def serving(script: Script | None = None, **settings: Any) -> Client:
    client = Client(script, **settings)
    client.ingress.models.served[MODEL] = FakeServed(CODER, FILES | {"chat_template.jinja": TEMPLATE.encode()})
    return client


def calling(name: str, arguments: str) -> Script:
    half = len(arguments) // 2
    return say_parts(
        [call(0, arguments[:half], name=name)], [call(0, arguments[half:])], reason="tool_calls", reasoning_tokens=0
    )


def job_of(client: Client) -> Job:
    return client.ingress.jobs[-1]


def offered(client: Client) -> list[str]:
    parse = job_of(client).generation.parse
    assert parse is not None
    return [tool["function"]["name"] for tool in parse.tools]


def names_of(toolset: Toolset) -> list[str]:
    return [each.name for tool in toolset.tools if (each := tool.function or tool.custom) is not None]


async def test_nested_tools_are_offered_under_one_name_and_called_under_two() -> None:
    client = serving(calling("mcp__depot__stock", '{"article": "nail"}'))
    answer = (await client.create(tools=[function("stock"), DEPOT])).json()
    assert offered(client) == ["stock", "mcp__depot__stock", "mcp__depot__note"]
    (made,) = answer["output"]
    assert (made["type"], made["namespace"], made["name"]) == ("function_call", "mcp__depot", "stock")
    assert json.loads(made["arguments"]) == {"article": "nail"}
    assert answer["tools"][1] == DEPOT
    parse = job_of(client).generation.parse
    assert parse is not None
    assert parse.tools[1]["function"]["strict"] is True
    assert parse.tools[1]["function"]["description"] == "stock does it.\n\nmcp__depot: The depot's server."


async def test_a_top_level_call_has_no_namespace() -> None:
    answer = (await serving(calling("stock", "{}")).create(tools=[function("stock"), DEPOT])).json()
    assert "namespace" not in answer["output"][0]


@pytest.mark.parametrize(
    ("offer", "kind", "key", "text"),
    [
        ("mcp__depot__stock", "function_call", "arguments", '{"article": "nail"}'),
        ("mcp__depot__note", "custom_tool_call", "input", "ten nails"),
    ],
)
async def test_streamed_calls_have_name_and_namespace_from_their_first_event(
    offer: str, kind: str, key: str, text: str
) -> None:
    arguments = text if key == "arguments" else json.dumps({"input": text})
    events = await serving(calling(offer, arguments)).stream(tools=[DEPOT])
    machine = Machine()
    for event in events:
        machine.take(event)
    items = [event["item"] for event in events if event["type"].startswith("response.output_item.")]
    assert [(item["type"], item["namespace"], item["name"]) for item in items] == [
        (kind, "mcp__depot", offer.rpartition("__")[2])
    ] * 2
    assert items[-1][key] == text
    assert machine.final["output"] == items[-1:]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in done] == (["stock"] if kind == "function_call" else [])


async def test_calls_of_earlier_turns_are_shown_to_the_model_under_the_offered_name() -> None:
    client = serving()
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "a", "namespace": "mcp__depot", "name": "stock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "7"},
        {"type": "custom_tool_call", "call_id": "b", "namespace": "mcp__depot", "name": "note", "input": "seven"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "ok"},
        {"type": "function_call", "call_id": "c", "namespace": "mcp__gone", "name": "away", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "8"},
    ]
    assert (await client.create(input=items, tools=[DEPOT])).status == 200
    prompt = client.prompt()
    for name in ("mcp__depot__stock", "mcp__depot__note", "mcp__gone__away"):
        assert f'"function": {{"name": "{name}"' in prompt


async def test_a_stored_turn_is_continued_with_its_namespaces() -> None:
    client = serving(calling("mcp__depot__stock", '{"article": "nail"}'))
    first = (await client.create(tools=[DEPOT])).json()
    stored = (await client.call("GET", f"/v1/responses/{first['id']}")).json()
    assert stored["output"] == first["output"]
    result = [{"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "7"}]
    assert (await client.create(input=result, tools=[DEPOT], previous_response_id=first["id"])).status == 200
    assert '"function": {"name": "mcp__depot__stock"' in client.prompt()
    short = await client.call(
        "POST", "/v1/responses/compact", {"model": MODEL, "input": result, "previous_response_id": first["id"]}
    )
    assert '"function": {"name": "mcp__depot__stock"' in client.prompt(), short.body


async def test_a_conversation_keeps_namespaces() -> None:
    client = serving(calling("mcp__depot__stock", '{"article": "nail"}'))
    name = (await client.call("POST", "/v1/conversations", {})).json()["id"]
    made = (await client.create(tools=[DEPOT], conversation=name)).json()["output"][0]
    items = (await client.call("GET", f"/v1/conversations/{name}/items?order=asc")).json()["data"]
    assert (items[-1]["namespace"], items[-1]["name"], items[-1]["id"]) == ("mcp__depot", "stock", made["id"])


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "namespace": "mcp__depot", "name": "stock"},
        {"type": "function", "name": "stock"},
    ],
)
async def test_a_nested_tool_can_be_forced(choice: dict[str, Any]) -> None:
    client = serving(calling("mcp__depot__stock", "{}"))
    answer = (await client.create(tools=[function("other"), DEPOT], tool_choice=choice)).json()
    parse = job_of(client).generation.parse
    assert parse is not None
    assert parse.choice == {"type": "function", "function": {"name": "mcp__depot__stock"}}
    assert answer["output"][0]["namespace"] == "mcp__depot"
    assert answer["tool_choice"] == choice


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ([{"type": "namespace", "name": "mcp__depot"}], ["mcp__depot__stock", "mcp__depot__note"]),
        ([{"type": "custom", "namespace": "mcp__depot", "name": "note"}], ["mcp__depot__note"]),
        ([{"type": "tool_search"}, {"type": "web_search"}, {"type": "function", "name": "other"}], ["other", "tool_search"]),
    ],
)
async def test_allowed_tools_may_be_nested(allowed: list[dict[str, Any]], names: list[str]) -> None:
    client = serving()
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    tools = [function("other"), DEPOT, SEARCH, {"type": "web_search"}]
    assert (await client.create(tools=tools, tool_choice=choice)).status == 200
    assert offered(client) == names


async def test_tools_that_a_search_found_are_offered_and_called() -> None:
    client = serving(calling("tool_search", '{"query": "depot"}'))
    asked = codex_turn(MODEL, "How many nails?", tools=[function("exec_command"), SEARCH])
    del asked["stream"]
    first = (await client.call("POST", "/v1/responses", asked)).json()
    (search,) = first["output"]
    assert search["arguments"] == {"query": "depot"}
    assert (search["type"], search["execution"], search["status"]) == ("tool_search_call", "client", "completed")
    client.ingress.script = calling("mcp__depot__stock", "{}")
    found = {
        "type": "tool_search_output",
        "call_id": search["call_id"],
        "status": "completed",
        "execution": "client",
        "tools": [space("mcp__depot", function("stock", defer_loading=True))],
    }
    asked["input"] += [search, found]
    second = (await client.call("POST", "/v1/responses", asked)).json()
    assert offered(client) == ["exec_command", "tool_search", "mcp__depot__stock"]
    assert (second["output"][0]["namespace"], second["output"][0]["name"]) == ("mcp__depot", "stock")
    prompt = client.prompt()
    assert '"function": {"name": "tool_search", "arguments": {"query": "depot"}}' in prompt
    assert json.dumps({"tools": ["mcp__depot__stock"]}).replace('"', '\\"') in prompt


async def test_a_streamed_search_has_no_events_of_its_arguments() -> None:
    events = await serving(calling("tool_search", '{"query": "depot"}')).stream(tools=[SEARCH])
    between = [event["type"] for event in events if event["type"] not in ("response.created", "response.in_progress")]
    assert between == ["response.output_item.added", "response.output_item.done", "response.completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[2]["item"]["arguments"] == {}
    assert events[3]["item"]["arguments"] == {"query": "depot"}


async def test_tools_of_an_item_are_offered_like_those_of_the_request() -> None:
    """Codex sends all tools so to some models; its own ones are in the namespace that stands for none."""
    client = serving(calling("exec_command", "{}"))
    added = {"type": "additional_tools", "role": "developer", "tools": [space("functions", function("exec_command")), DEPOT]}
    answer = (await client.create(input=[added, {"role": "user", "content": "x"}])).json()
    assert offered(client) == ["exec_command", "mcp__depot__stock", "mcp__depot__note"]
    assert answer["output"][0]["name"] == "exec_command"


def test_names_fit_and_never_collide() -> None:
    long = "n" * 50
    tools = [
        space("a", function("b__c"), function("x.y"), function("x_y")),
        space("a__b", function("c")),
        function("a__d"),
        space("a", function("d")),
        space(long, function(long), function(long + "m")),
        space("", function("x")) | {"name": "functions"},
        function("x"),
        SEARCH,
        function("tool_search"),
    ]
    names = names_of(toolset_of(tools))
    assert len(set(names)) == len(names) == 12
    assert max(map(len, names)) <= MAX_NAME
    assert {"a__d", "x", "tool_search"} < set(names)
    backwards = toolset_of([{**tool, "tools": tool["tools"][::-1]} if "tools" in tool else tool for tool in tools[::-1]])
    assert backwards.offers == toolset_of(tools).offers
    assert flat_name("a b", "c/d") == "a_b__c_d"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"tools": [{"type": "namespace"}]}, "tools[0].name"),
        ({"tools": [space("")]}, "tools[0].name"),
        ({"tools": [space("a", {"type": "web_search"})]}, "tools[0].tools[0].type"),
        ({"tools": [space("a", function(""))]}, "tools[0].tools[0].name"),
        ({"tools": [space("a", function("b", parameters=3))]}, "tools[0].tools[0]"),
        ({"tools": [space("a", function("b")), space("a", function("b"))]}, "tools[1].tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 3}]}, "tools[0].tools"),
        (
            {"tools": [DEPOT], "tool_choice": {"type": "function", "namespace": "x", "name": "stock"}},
            "tool_choice.function.name",
        ),
        (
            {"tools": [DEPOT], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "x"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"input": [{"type": "tool_search_output", "call_id": "a", "tools": []}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "tool_search_output", "call_id": "a", "tools": [{}]}]},
            "input[1].tools[0].type",
        ),
        ({"input": [{"type": "additional_tools", "tools": [space("a", function(""))]}]}, "input[0].tools[0].tools[0].name"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "namespace": 3}]}, "input[0].namespace"),
    ],
)
async def test_what_is_wrong_is_named(request_: dict[str, Any], param: str) -> None:
    refused = await serving().create(**request_)
    assert (refused.status, refused.error["param"]) == (400, param)
