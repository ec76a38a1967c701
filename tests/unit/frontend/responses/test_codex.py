"""Requests of the shape that Codex sends: its tools, its parameters, and its history of reasoning, calls and results."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.frontend.answer_parts import call, content, say_parts, thought
from tests.support.frontend.codex_shape import codex_turn, said
from tests.support.frontend.fakes import CARD, FILES, MODEL, FakeServed, Script
from tests.support.frontend.responses_client import Client
from tests.support.frontend.responses_machine import Machine

CODER = msgspec.structs.replace(CARD, tool_parser="hermes", reasoning_parser="think", context_length=32_768)

GRAMMAR = """\
start: "*** Begin Patch" LF section+ "*** End Patch" LF?
section: "*** Add File: " /.+/ LF ("+" /.*/ LF)+
       | "*** Delete File: " /.+/ LF
LF: "\\n"
"""
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. The input is a patch as plain text, not JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}


def function(name: str, *required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "name": name, "description": f"{name} does it.", "strict": False, "parameters": parameters}


EXEC = function("exec_command", "cmd", cmd={"type": "string"}, yield_time_ms={"type": "number"}, tty={"type": "boolean"})
STDIN = function("write_stdin", "session_id", session_id={"type": "number"}, chars={"type": "string"})
PLAN = function(
    "update_plan",
    "plan",
    explanation={"type": "string"},
    plan={
        "type": "array",
        "items": {"type": "object", "properties": {"step": {"type": "string"}, "status": {"type": "string"}}},
    },
)
VIEW = function("view_image", "path", path={"type": "string"})
WEB_SEARCH = {"type": "web_search", "external_web_access": False}
LOCAL_SHELL = {"type": "local_shell"}


def asked(*items: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    given = tools if tools is not None else [EXEC, STDIN, PLAN, APPLY_PATCH, VIEW]
    return codex_turn(MODEL, "Add a file.", *items, tools=given)


def serving(script: Script) -> Client:
    client = Client(script)
    client.ingress.models.served[MODEL] = FakeServed(CODER, FILES)
    return client


PATCH = "*** Begin Patch\n*** Add File: a.txt\n+hello\n*** End Patch\n"
FIRST = say_parts(
    [thought("A patch will do.")],
    [content("Adding it.")],
    [call(0, '{"input": "*** Begin Patch\\n*** Add File: a.txt\\n', name="apply_patch")],
    [call(0, '+hello\\n*** End Patch\\n"}')],
    reason="tool_calls",
    reasoning_tokens=1,
)


async def turn(client: Client, request: dict[str, Any]) -> dict[str, Any]:
    request = {key: value for key, value in request.items() if key not in ("model", "stream")}
    machine = Machine()
    for event in await client.stream(**request):
        machine.take(event)
    assert machine.ended
    assert machine.final["status"] == "completed"
    return machine.final


async def test_a_patch_is_a_freeform_call_and_its_result_goes_on() -> None:
    client = serving(FIRST)
    first = await turn(client, asked())
    reasoning, message, patch = first["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    job = client.ingress.jobs[-1]
    assert job.generation.parse is not None
    assert job.generation.parse.parallel is False
    assert job.session
    assert not client.store.held
    # it sends back what it was given, without ids and without the reasoning's text
    history = [
        {**reasoning, "content": None, "encrypted_content": None},
        {key: value for key, value in message.items() if key not in ("id", "status")},
        {key: value for key, value in patch.items() if key != "id"},
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "Exit code: 0"},
        {"type": "function_call", "call_id": "c2", "name": "exec_command", "arguments": '{"cmd":"ls"}'},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a.txt"}]},
    ]
    await turn(client, asked(*history))
    prompt = client.prompt()
    assert "Adding it." in prompt
    assert prompt.endswith("<tool>a.txt</s><assistant>")
    assert "<tool>Exit code: 0</s>" in prompt


@pytest.mark.parametrize("tool", [WEB_SEARCH, LOCAL_SHELL])
async def test_a_tool_of_openais_servers_is_left_out_and_ends_no_session(tool: dict[str, Any]) -> None:
    client = serving(FIRST)
    final = await turn(client, asked(tools=[EXEC, APPLY_PATCH, tool]))
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "custom_tool_call"]
    assert tool["type"] not in client.prompt()


async def test_a_long_session_is_compacted_by_the_server_and_goes_on() -> None:
    client = serving(say_parts([content("A file was added.")]))
    request = {"model": MODEL, "input": asked()["input"], "instructions": "You are a coding agent."}
    compacted = await client.call("POST", "/v1/responses/compact", request)
    assert compacted.status == 200, compacted.body
    await turn(client, {**asked(), "input": [*compacted.json()["output"], said("user", "Go on.")]})
    assert "A file was added.</s><user>Go on.</s><assistant>" in client.prompt()
