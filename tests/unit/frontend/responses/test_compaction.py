"""Compaction: the user's messages and a summary take the place of a conversation, and the conversation goes on from them."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import CompactedResponse
from pydantic import TypeAdapter

from headrace.frontend.responses.compaction import REQUEST
from tests.support.frontend.answer_parts import content, say_parts, thought
from tests.support.frontend.fakes import MODEL, Call, say
from tests.support.frontend.open_responses import problems
from tests.support.frontend.responses_client import Client

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "My name is Alice."},
    {"type": "message", "role": "assistant", "content": "Hello.", "phase": "final_answer"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
    {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}]},
]


async def compact(client: Client, **request: Any) -> Call:
    return await client.call("POST", "/v1/responses/compact", {"model": MODEL, **request})


async def test_what_the_user_said_is_kept_and_all_else_becomes_a_summary() -> None:
    client = Client(say("She is ", "Alice."))
    call = await compact(client, input=TALK, instructions="Be kind.", prompt_cache_key="k")
    assert call.status == 200, call.body
    answer = call.json()
    TypeAdapter(CompactedResponse).validate_python(
        {**answer, "output": answer["output"][2:]}
    )  # it has no type for user messages
    assert problems(answer) == []
    assert [item["type"] for item in answer["output"]] == ["message", "message", "compaction"]
    assert [item["content"][0]["text"] for item in answer["output"][:2]] == ["My name is Alice.", "What is it?"]
    assert len({item["id"] for item in answer["output"]}) == 3
    assert answer["usage"]["output_tokens"] == 2
    assert client.prompt().startswith("<system>Be kind.</s><user>My name is Alice.</s><assistant>")
    assert client.prompt().endswith(f"<user>{REQUEST}</s><assistant>")


async def test_a_conversation_goes_on_from_its_compaction() -> None:
    client = Client(say("She is Alice."))
    output = (await compact(client, input=TALK)).json()["output"]
    assert (await client.create(input=[*output, {"role": "user", "content": "Who am I?"}])).status == 200
    summary = "Summary of the conversation so far:\nShe is Alice."
    asked = "<user>My name is Alice.</s><user>What is it?</s>"
    assert client.prompt() == f"{asked}<assistant>{summary}</s><user>Who am I?</s><assistant>"
    again = (await compact(client, input=output)).json()["output"]
    assert [item["type"] for item in again] == ["message", "message", "compaction"]


async def test_a_stored_conversation_is_compacted_by_its_id() -> None:
    client = Client(say("Hello"))
    first = (await client.create(input="one")).json()
    answer = (await compact(client, previous_response_id=first["id"])).json()
    assert answer["output"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert client.prompt().startswith("<user>one</s><assistant>Hello</s><user>")
    gone = await compact(client, previous_response_id="resp_none")
    assert (gone.status, gone.error["code"]) == (400, "previous_response_not_found")


async def test_reasoning_is_no_part_of_a_summary_and_an_empty_one_is_an_error() -> None:
    only = await compact(Client(say_parts([thought("hm")], [content(" ")])), input=TALK)
    assert (only.status, only.error["code"]) == (502, "engine_error")
    both = (await compact(Client(say_parts([thought("hm")], [content("So.")])), input="one")).json()
    assert (await Client(say("x")).create(input=both["output"])).status == 200


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"model": None, "input": "x"}, "model"),
        ({}, "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "hrc1.%"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ],
)
async def test_what_cannot_be_compacted_is_refused_by_name(request_: dict[str, Any], param: str) -> None:
    client = Client()
    call = await compact(client, **request_)
    assert (call.status, call.error["param"]) == (400, param), call.body
    assert not client.ingress.jobs


async def test_a_model_has_to_be_named() -> None:
    call = await Client().call("POST", "/v1/responses/compact", {"input": "x"})
    assert (call.status, call.error["code"], call.error["param"]) == (400, "missing_required_parameter", "model")


async def test_a_wrong_method_is_answered_with_the_right_ones_in_order() -> None:
    for path, allowed in {
        "/v1/responses/resp_a": "DELETE, GET, HEAD",
        "/v1/responses/compact": "DELETE, GET, HEAD, POST",
        "/v1/responses/resp_a/cancel": "POST",
    }.items():
        call = await Client().call("PUT", path)
        assert (call.status, call.headers["allow"]) == (405, allowed)
        assert call.error["message"] == f"{path} does not take PUT; it takes {allowed}"
