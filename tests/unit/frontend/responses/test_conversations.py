"""Conversations: items that responses and clients add, in order, for one tenant, within bounds."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItemList
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from headrace.broker.errors import ResponseNotStored
from headrace.frontend.responses import conversations as limits
from tests.support.frontend.answer_parts import call, content, say_parts, thought
from tests.support.frontend.fakes import Call, FakeIngress, frontend, get, post, say
from tests.support.frontend.responses_client import Client
from tests.support.frontend.responses_machine import Machine

BASE = "/v1/conversations"


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text, **more}


async def create(client: Client, **body: Any) -> str:
    made = await client.call("POST", BASE, body)
    assert made.status == 200, made.body
    Conversation.model_validate(made.json())
    name: str = made.json()["id"]
    return name


async def items(client: Client, name: str, query: str = "order=asc&limit=100") -> list[dict[str, Any]]:
    listed = await client.call("GET", f"{BASE}/{name}/items?{query}")
    assert listed.status == 200, listed.body
    if listed.json()["data"]:
        TypeAdapter(ConversationItemList).validate_python(listed.json())
    data: list[dict[str, Any]] = listed.json()["data"]
    return data


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in found for part in item.get("content") or ()]


async def test_a_conversation_is_made_read_changed_and_deleted() -> None:
    client = Client()
    name = await create(client, metadata={"a": "b"}, items=[user("one")])
    found = (await client.call("GET", f"{BASE}/{name}")).json()
    assert (found["object"], found["metadata"]) == ("conversation", {"a": "b"})
    changed = await client.call("POST", f"{BASE}/{name}", {"metadata": {"c": "d"}})
    assert changed.json() == {**found, "metadata": {"c": "d"}}
    deleted = (await client.call("DELETE", f"{BASE}/{name}")).json()
    assert ConversationDeletedResource.model_validate(deleted).id == name
    for method, path in (("GET", name), ("DELETE", name), ("GET", f"{name}/items"), ("GET", f"{name}/items/x")):
        gone = await client.call(method, f"{BASE}/{path}")
        assert (gone.status, gone.error["code"]) == (404, "conversation_not_found")
    assert not client.records.held
    assert not client.store.held


async def test_one_may_be_made_of_nothing() -> None:
    client = Client()
    bare = Call(client.frontend.app, BASE, b"")
    assert (await bare.run()).json()["metadata"] == {}
    assert await items(client, bare.json()["id"]) == []


async def test_items_are_added_listed_read_and_removed() -> None:
    client = Client()
    name = await create(client, items=[user("one"), user("two", id="msg_own")])
    added = await client.call("POST", f"{BASE}/{name}/items", {"items": [user("three"), user("again", id="msg_own")]})
    assert texts(added.json()["data"]) == ["three", "again"]
    found = await items(client, name)
    assert texts(found) == ["one", "two", "three", "again"]
    ids = [item["id"] for item in found]
    assert ids[1] == "msg_own"
    assert len(set(ids)) == 4
    assert all(item["status"] == "completed" for item in found)
    assert texts(await items(client, name, "limit=2")) == ["again", "three"]
    assert texts(await items(client, name, f"order=asc&after={ids[1]}&limit=1")) == ["three"]
    one = await client.call("GET", f"{BASE}/{name}/items/{ids[2]}")
    assert one.json() == found[2]
    dropped = await client.call("DELETE", f"{BASE}/{name}/items/{ids[2]}")
    assert dropped.json()["id"] == name
    assert texts(await items(client, name)) == ["one", "two", "again"]
    for method in ("GET", "DELETE"):
        gone = await client.call(method, f"{BASE}/{name}/items/{ids[2]}")
        assert (gone.status, gone.error["code"]) == (404, "item_not_found")


async def test_responses_continue_a_conversation_and_add_to_it() -> None:
    client = Client(say("Hello"))
    name = await create(client, items=[user("I am Alice.")])
    first = (await client.create(input="Who am I?", conversation=name, instructions="Be brief.")).json()
    assert first["conversation"] == {"id": name}
    assert client.prompt() == "<system>Be brief.</s><user>I am Alice.</s><user>Who am I?</s><assistant>"
    second = (await client.stream(input="And now?", conversation={"id": name}))[-1]["response"]
    assert second["conversation"] == {"id": name}
    said = "<user>I am Alice.</s><user>Who am I?</s><assistant>Hello</s><user>And now?</s>"
    assert client.prompt() == f"{said}<assistant>"
    found = await items(client, name)
    assert texts(found) == ["I am Alice.", "Who am I?", "Hello", "And now?", "Hello"]
    assert found[2]["id"] == first["output"][0]["id"]
    third = await client.create(input="x", previous_response_id=second["id"])
    assert third.status == 200
    assert client.prompt() == f"{said}<assistant>Hello</s><user>x</s><assistant>"


async def test_a_removed_item_is_no_longer_said() -> None:
    client = Client(say("Hello"))
    name = await create(client, items=[user("one"), user("two")])
    first = (await items(client, name))[0]["id"]
    await client.call("DELETE", f"{BASE}/{name}/items/{first}")
    assert (await client.create(input="three", conversation=name)).status == 200
    assert client.prompt() == "<user>two</s><user>three</s><assistant>"


async def test_calls_and_their_results_are_part_of_it() -> None:
    client = Client(say_parts([thought("hm")], [call(0, "{}", name="f")], reason="tool_calls"))
    name = await create(client)
    machine = Machine()
    for event in await client.stream(input="go", conversation=name):
        machine.take(event)
    output = {"type": "function_call_output", "call_id": machine.items[1]["call_id"], "output": "42"}
    added = await client.call("POST", f"{BASE}/{name}/items", {"items": [output]})
    assert added.status == 200, added.body
    client.ingress.script = say_parts([content("So.")])
    assert (await client.create(input=[user("and?")], conversation=name)).status == 200
    assert client.prompt().endswith("<tool>42</s><user>and?</s><assistant>")
    assert [item["type"] for item in await items(client, name)] == [
        *("message", "reasoning", "function_call", "function_call_output", "message", "message"),
    ]


async def test_a_conversation_grows_whether_the_response_is_stored_or_not() -> None:
    client = Client(say("Hello"))
    name = await create(client)
    answer = (await client.create(input="one", conversation=name, store=False)).json()
    assert (answer["store"], answer["conversation"]) == (False, {"id": name})
    assert texts(await items(client, name)) == ["one", "Hello"]


async def test_what_another_writer_did_meanwhile_stays() -> None:
    client = Client()
    name = await create(client)

    def other() -> None:
        (key,) = client.records.held
        client.records.held[key] = client.records.held[key].replace(b'"metadata":{}', b'"metadata":{"by":"another"}')

    client.records.before_write = other
    await client.call("POST", f"{BASE}/{name}/items", {"items": [user("one")]})
    assert texts(await items(client, name)) == ["one"]
    assert (await client.call("GET", f"{BASE}/{name}")).json()["metadata"] == {"by": "another"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_could_not_be_added_says_so(stream: bool) -> None:
    client = Client(say("Hello"))
    name = await create(client, items=[user("one")])
    client.records.before_write = client.records.held.clear  # deleted while the answer was generated
    with capture_logs() as logs:
        answer = await client.create(input="two", conversation=name, stream=stream)
    assert answer.status == 200
    assert b'"conversation":null' in answer.body
    assert [line["conversation"] for line in logs if line["event"] == "conversation.not_extended"] == [name]
    text = (await client.call("GET", "/metrics")).body.decode()
    assert 'headrace_frontend_stored_responses_total{outcome="not_added"} 1.0' in text


async def test_a_conversation_that_lost_items_says_so() -> None:
    client = Client()
    name = await create(client, items=[user("one")])
    client.store.held.clear()
    for answer in (
        await client.create(input="two", conversation=name),
        await client.call("GET", f"{BASE}/{name}/items"),
    ):
        assert (answer.status, answer.error["code"]) == (400, "conversation_incomplete")
    assert (await client.call("DELETE", f"{BASE}/{name}")).status == 200


async def test_it_is_a_tenants_own() -> None:
    client = Client()
    name = await create(client)
    for method, path in (("GET", name), ("DELETE", name), ("GET", f"{name}/items")):
        assert (await client.call(method, f"{BASE}/{path}", x_headrace_tenant="b")).status == 404
    answer = await client.call(
        "POST", "/v1/responses", {"model": "tiny", "input": "x", "conversation": name}, x_headrace_tenant="b"
    )
    assert (answer.status, answer.error["code"]) == (404, "conversation_not_found")


async def test_bounds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(response_max_turns=2)
    name = await create(client, items=[user("one")])
    assert (await client.call("POST", f"{BASE}/{name}/items", {"items": [user("two")]})).status == 200
    full = await client.call("POST", f"{BASE}/{name}/items", {"items": [user("three")]})
    assert (full.status, full.error["code"]) == (400, "conversation_too_long")
    assert texts(await items(client, name)) == ["one", "two"]
    assert len(client.store.held) == 2
    many = await client.call("POST", BASE, {"items": [user("x")] * 21})
    assert (many.status, many.error["param"]) == (400, "items")
    monkeypatch.setattr(limits, "MAX_ITEMS", 2)
    short = Client()
    name = await create(short, items=[user("one"), user("two")])
    full = await short.call("POST", f"{BASE}/{name}/items", {"items": [user("three")]})
    assert (full.status, full.error["code"]) == (400, "conversation_too_long")
    large = Client(max_body_bytes=400)
    big = await create(large, items=[user("x" * 200)])
    await large.call("POST", f"{BASE}/{big}/items", {"items": [user("y" * 150)]})
    refused = await large.create(input="z", conversation=big)
    assert (refused.status, refused.error["code"]) == (400, "conversation_too_long")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"type": "web_search_call"}]}, "items[0].type"),
        ({"items": [user("x"), {"role": "user"}]}, "items[1].content"),
        ({"items": [{"type": "item_reference", "id": "msg_x"}]}, "items[0].type"),
        ({"items": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "items[0].call_id"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_kept(body: dict[str, Any], param: str) -> None:
    client = Client()
    wrong = await client.call("POST", BASE, body)
    assert wrong.status == 400
    assert wrong.error["param"].startswith(param)
    assert not client.store.held
    name = await create(client)
    if "items" in body:
        assert (await client.call("POST", f"{BASE}/{name}/items", body)).error["param"] == param


async def test_requests_that_make_no_sense_are_refused() -> None:
    client = Client()
    name = await create(client)
    both = await client.create(conversation=name, previous_response_id="resp_a")
    assert (both.status, both.error["param"]) == (400, "conversation")
    counted = await client.call("POST", "/v1/responses/input_tokens", {"model": "tiny", "conversation": name, "input": "abc"})
    assert counted.status == 200
    none = await client.create(conversation="conv_none")
    assert (none.status, none.error["code"]) == (404, "conversation_not_found")


async def test_a_conversation_that_cannot_be_stored_is_an_error() -> None:
    client = Client()
    client.records.put_error = ResponseNotStored("full")
    refused = await client.call("POST", BASE, {})
    assert (refused.status, refused.error["code"]) == (503, "response_not_stored")


async def test_without_a_store_they_are_refused_by_name() -> None:
    app = frontend(FakeIngress()).app
    for answer in (await post(app, {}, BASE), await get(app, f"{BASE}/conv_x")):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", "conversation")
