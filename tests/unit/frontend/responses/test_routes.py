"""Stored responses: continuing them, reading and deleting them, bounds, tenants, and a store that fails."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import CompactedResponse
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from headrace.broker.errors import ResponseNotStored
from headrace.frontend.responses.routes import REQUEST
from headrace.jetstream.errors import RequestTimeout
from tests.support.frontend.answer_parts import call, content, say_parts, thought
from tests.support.frontend.fakes import MODEL, Call, say
from tests.support.frontend.open_responses import problems
from tests.support.frontend.responses_client import Client, events_of


async def test_a_response_is_continued_by_its_id() -> None:
    client = Client(say("Hello"))
    first = (await client.create(input="one", instructions="Be brief.")).json()
    second = (await client.create(input="two", previous_response_id=first["id"])).json()
    third = await client.create(input="three", previous_response_id=second["id"], instructions="Be long.")
    assert third.json()["previous_response_id"] == second["id"]
    said = "<user>one</s><assistant>Hello</s><user>two</s><assistant>Hello</s><user>three</s>"
    assert client.prompt() == f"<system>Be long.</s>{said}<assistant>"  # instructions do not carry over


async def test_a_streamed_response_is_stored_before_it_is_said_to_be_complete() -> None:
    client = Client(say("Hello"))
    last = (await client.stream(input="one"))[-1]["response"]
    assert last["store"] is True
    stored = (await client.call("GET", f"/v1/responses/{last['id']}")).json()
    assert stored == last


async def test_calls_and_reasoning_are_part_of_what_is_continued() -> None:
    client = Client(say_parts([thought("hm")], [call(0, "{}", name="f")], reason="tool_calls"))
    first = (await client.create()).json()
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "42"}
    assert (await client.create(input=[output], previous_response_id=first["id"])).status == 200
    assert client.prompt().endswith("<tool>42</s><assistant>")


async def test_an_item_is_found_by_reference_in_any_stored_turn() -> None:
    client = Client(say("Hello"))
    first = (await client.create(input="one")).json()
    items = (await client.call("GET", f"/v1/responses/{first['id']}/input_items")).json()["data"]
    reference = [{"type": "item_reference", "id": items[0]["id"]}, {"type": "item_reference", "id": first["output"][0]["id"]}]
    assert (await client.create(input=[*reference, {"role": "user", "content": "two"}])).status == 200
    assert client.prompt() == "<user>one</s><assistant>Hello</s><user>two</s><assistant>"


async def test_what_is_not_to_be_stored_is_not() -> None:
    client = Client()
    answer = (await client.create(store=False)).json()
    assert answer["store"] is False
    assert not client.store.held
    assert (await client.call("GET", f"/v1/responses/{answer['id']}")).status == 404


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_could_not_be_stored_comes_all_the_same_and_says_so(stream: bool) -> None:
    client = Client()
    client.store.put_error = ResponseNotStored("full", reason="unavailable")
    with capture_logs() as logs:
        answer = await client.create(stream=stream)
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    assert (answer.status, response["status"], response["store"]) == (200, "completed", False)
    assert [line["reason"] for line in logs if line["event"] == "response.not_stored"] == ["unavailable"]
    text = (await client.call("GET", "/metrics")).body.decode()
    assert 'headrace_frontend_stored_responses_total{outcome="unavailable"} 1.0' in text


async def test_a_store_that_cannot_be_read_is_a_503_and_nothing_is_run() -> None:
    client = Client()
    client.store.get_error = RequestTimeout("no answer")
    answer = await client.create(previous_response_id="resp_a")
    assert (answer.status, answer.error["code"]) == (503, "broker_unavailable")
    assert (await client.call("GET", "/v1/responses/resp_a")).status == 503
    assert not client.ingress.jobs


async def test_a_turn_that_is_gone_is_named() -> None:
    client = Client()
    first = (await client.create()).json()["id"]
    second = (await client.create(previous_response_id=first)).json()["id"]
    del client.store.held[first]
    answer = await client.create(previous_response_id=second)
    assert (answer.status, answer.error["code"]) == (400, "previous_response_not_found")
    assert first in answer.error["message"]


async def test_a_conversation_has_a_most_number_of_turns() -> None:
    client = Client(response_max_turns=2)
    last: str | None = None
    for _ in range(2):
        more = {"previous_response_id": last} if last else {}
        last = (await client.create(**more)).json()["id"]
    answer = await client.create(previous_response_id=last)
    assert answer.status == 200
    answer = await client.create(previous_response_id=answer.json()["id"])
    assert (answer.status, answer.error["code"]) == (400, "conversation_too_long")
    assert "3 turns, the limit is 2" in answer.error["message"]


async def test_a_conversation_has_a_largest_size() -> None:
    client = Client(max_body_bytes=900)
    first = (await client.create(input="x" * 300)).json()["id"]
    second = (await client.create(input="x" * 50, previous_response_id=first)).json()["id"]
    answer = await client.create(previous_response_id=second)
    assert (answer.status, answer.error["code"]) == (400, "conversation_too_long")


async def test_tenants_do_not_see_each_others_responses() -> None:
    client = Client()
    mine = (await client.call("POST", "/v1/responses", {"model": "tiny", "input": "x"}, x_headrace_tenant="me")).json()["id"]
    assert (await client.call("GET", f"/v1/responses/{mine}", x_headrace_tenant="me")).status == 200
    assert (await client.call("GET", f"/v1/responses/{mine}")).status == 404
    assert (await client.call("DELETE", f"/v1/responses/{mine}", x_headrace_tenant="you")).status == 404
    assert (await client.create(previous_response_id=mine)).status == 400


async def test_a_deleted_response_is_gone() -> None:
    client = Client()
    name = (await client.create()).json()["id"]
    answer = await client.call("DELETE", f"/v1/responses/{name}")
    assert answer.json() == {"id": name, "object": "response", "deleted": True}
    again = await client.call("DELETE", f"/v1/responses/{name}")
    assert (again.status, again.error["code"]) == (404, "response_not_found")


async def test_input_items_come_in_pages_the_last_first() -> None:
    client = Client()
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    name = (await client.create(input=items)).json()["id"]

    async def page(query: str) -> Any:
        return (await client.call("GET", f"/v1/responses/{name}/input_items?{query}")).json()

    def said(page: Any) -> list[str]:
        return [item["content"][0]["text"] for item in page["data"]]

    assert said(await page("")) == list("43210")
    first = await page("order=asc&limit=2")
    assert (said(first), first["has_more"]) == (list("01"), True)
    assert first["last_id"] == first["data"][-1]["id"]
    rest = await page(f"order=asc&after={first['last_id']}")
    assert (said(rest), rest["has_more"]) == (list("234"), False)
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=msg_x", "after")):
        assert (await page(query))["error"]["param"] == param


async def test_one_that_was_not_made_in_the_background_is_not_cancelled_and_not_streamed_again() -> None:
    client = Client()
    name = (await client.create()).json()["id"]
    cancelled = await client.call("POST", f"/v1/responses/{name}/cancel")
    assert (cancelled.status, cancelled.error["param"]) == (400, "response_id")
    assert (await client.call("POST", "/v1/responses/resp_x/cancel")).status == 404
    again = await client.call("GET", f"/v1/responses/{name}?stream=true")
    assert (again.status, again.error["param"]) == (400, "stream")


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
