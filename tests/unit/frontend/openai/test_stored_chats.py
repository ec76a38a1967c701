"""Stored chat completions: kept as they were answered, listed by filters, changed, deleted, and a tenant's own."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionDeleted
from structlog.testing import capture_logs

from headrace.broker.errors import ResponseNotStored
from headrace.frontend.app import build_frontend
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.answer_parts import call, content, say_parts
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, chat, get, post, say
from tests.support.frontend.responses_client import Client
from tests.unit.frontend.generation.test_request_checks import TOOL_CARD, WEATHER

PATH = "/v1/chat/completions"


async def ask(client: Client, *, tenant: str = "", **body: Any) -> Call:
    headers = {"x-headrace-tenant": tenant} if tenant else {}
    return await client.call("POST", PATH, chat(store=True, **body), **headers)


async def stored(client: Client, **body: Any) -> str:
    answer = await ask(client, **body)
    assert answer.status == 200, answer.body
    name: str = answer.json()["id"]
    return name


async def read(client: Client, name: str) -> Any:
    return (await client.call("GET", f"{PATH}/{name}")).json()


async def test_a_completion_is_read_as_it_was_answered() -> None:
    client = Client(say("Hello", " you"))
    answer = (await ask(client, metadata={"a": "b"}, logprobs=True)).json()
    found = await read(client, answer["id"])
    ChatCompletion.model_validate(found)
    assert found == {**answer, "service_tier": None, "metadata": {"a": "b"}}


@pytest.mark.parametrize("usage", [True, False])
async def test_a_streamed_completion_is_stored_whole_and_streamed_as_ever(usage: bool) -> None:
    options: dict[str, Any] = {"stream": True, "n": 2} | ({"stream_options": {"include_usage": True}} if usage else {})
    plain = (await Client().call("POST", PATH, chat(**options))).events()
    client = Client()
    call_ = await ask(client, **options)
    events = call_.events()

    def same(event: Any) -> Any:
        return event if isinstance(event, str) else {k: v for k, v in event.items() if k not in ("id", "created")}

    assert [same(event) for event in events] == [same(event) for event in plain]
    found = await read(client, events[0]["id"])
    assert [choice["message"]["content"] for choice in found["choices"]] == ["Hello world"] * 2
    assert found["usage"]["completion_tokens"] == 4
    if usage:
        assert events[-2]["usage"] == found["usage"]


async def test_calls_of_tools_are_stored() -> None:
    client = Client(say_parts([content("x")], [call(0, '{"a"', name="weather")], [call(0, ":1}")], reason="tool_calls"))
    client.ingress.models.served[MODEL] = FakeServed(TOOL_CARD, FILES)
    events = (await ask(client, tools=[WEATHER], stream=True)).events()
    found = await read(client, events[0]["id"])
    (called,) = found["choices"][0]["message"]["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": '{"a":1}'}


async def test_only_what_is_to_be_stored_is() -> None:
    client = Client()
    for store in (None, False):
        assert (await client.call("POST", PATH, chat(store=store))).status == 200
    assert not client.records.held
    assert not client.store.held


async def test_they_are_listed_by_model_metadata_order_and_page() -> None:
    client = Client()
    client.ingress.models.served["other"] = FakeServed(
        CARD.__class__(**{f: getattr(CARD, f) for f in CARD.__struct_fields__} | {"model": "other", "aliases": []}), FILES
    )
    names = [await stored(client, metadata={"kind": "even" if i % 2 == 0 else "odd", "i": str(i)}) for i in range(4)]
    other = await stored(client, model="other")

    async def page(query: str = "") -> Any:
        return (await client.call("GET", f"{PATH}?{query}")).json()

    everything = await page()
    assert {one["id"] for one in everything["data"]} == {*names, other}
    order = [one["id"] for one in everything["data"]]
    assert [one["id"] for one in (await page("order=desc"))["data"]] == order[::-1]
    assert [one["id"] for one in (await page("model=other"))["data"]] == [other]
    odd = await page("metadata%5Bkind%5D=odd")
    assert {one["metadata"]["i"] for one in odd["data"]} == {"1", "3"}
    assert (await page("metadata[kind]=odd&metadata[i]=1"))["first_id"] == names[1]
    first = await page("limit=2")
    assert (len(first["data"]), first["has_more"], first["last_id"]) == (2, True, order[1])
    rest = await page(f"limit=3&after={first['last_id']}")
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (order[2:], False)
    for query, param in (
        ("limit=0", "limit"),
        ("order=up", "order"),
        ("after=chatcmpl-x", "after"),
        ("metadata=x", "metadata"),
    ):
        assert (await page(query))["error"]["param"] == param


async def test_metadata_is_changed_and_a_completion_deleted() -> None:
    client = Client()
    name = await stored(client, metadata={"a": "b"})
    changed = await client.call("POST", f"{PATH}/{name}", {"metadata": {"c": "d"}})
    assert changed.json()["metadata"] == (await read(client, name))["metadata"] == {"c": "d"}
    emptied = await client.call("POST", f"{PATH}/{name}", {"metadata": None})
    assert emptied.json()["metadata"] == {}
    wrong = await client.call("POST", f"{PATH}/{name}", {"metadata": {"k" * 65: "v"}})
    assert (wrong.status, wrong.error["code"]) == (400, "invalid_parameter")
    assert (await client.call("POST", f"{PATH}/{name}", {})).error["param"] == "metadata"
    deleted = (await client.call("DELETE", f"{PATH}/{name}")).json()
    assert ChatCompletionDeleted.model_validate(deleted).deleted
    for method in ("GET", "DELETE"):
        gone = await client.call(method, f"{PATH}/{name}")
        assert (gone.status, gone.error["code"]) == (404, "completion_not_found")
    assert (await client.call("POST", f"{PATH}/{name}", {"metadata": {}})).status == 404
    assert (await client.call("GET", f"{PATH}/{name}/messages")).status == 404
    assert not client.records.held
    assert not client.store.held


async def test_its_messages_are_listed_in_their_order() -> None:
    client = Client()
    parts = [{"type": "text", "text": "a"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts, "name": "me"}]
    name = await stored(client, messages=messages)

    async def page(query: str = "") -> Any:
        return (await client.call("GET", f"{PATH}/{name}/messages?{query}")).json()

    system, user = (await page())["data"]
    assert (system["role"], system["content"], system["content_parts"]) == ("system", "Be kind.", None)
    assert (user["content"], user["content_parts"], user["name"]) == (None, parts, "me")
    assert (await page("order=desc&limit=1"))["data"] == [user]
    assert (await page(f"after={system['id']}"))["data"] == [user]


async def test_a_tenant_sees_only_its_own_even_under_the_same_id() -> None:
    client = Client(say("mine"))
    mine = (await ask(client, tenant="a", request_id="x/y:z")).json()
    client.ingress.script = say("theirs")
    theirs = (await ask(client, tenant="b", request_id="x/y:z")).json()
    assert mine["id"] == theirs["id"] == "chatcmpl-x/y:z"
    for tenant, said in (("a", "mine"), ("b", "theirs")):
        found = (await client.call("GET", f"{PATH}/{mine['id']}", x_headrace_tenant=tenant)).json()
        assert found["choices"][0]["message"]["content"] == said
        listed = (await client.call("GET", PATH, x_headrace_tenant=tenant)).json()
        assert [one["id"] for one in listed["data"]] == [mine["id"]]
    assert (await client.call("GET", f"{PATH}/{mine['id']}")).status == 404


async def test_other_routes_do_not_reach_it() -> None:
    client = Client()
    await stored(client)
    (name,) = client.store.held
    assert (await client.call("GET", f"/v1/responses/{name}")).status == 404
    assert (await client.call("DELETE", f"/v1/responses/{name}")).status == 404
    assert (await client.create(previous_response_id=name)).error["code"] == "previous_response_not_found"


@pytest.mark.parametrize("place", ["store", "records"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_could_not_be_stored_comes_all_the_same(place: str, stream: bool) -> None:
    client = Client()
    getattr(client, place).put_error = ResponseNotStored("full", reason="unavailable")
    with capture_logs() as logs:
        answer = await ask(client, stream=stream)
    assert answer.status == 200
    assert [line["reason"] for line in logs if line["event"] == "completion.not_stored"] == ["unavailable"]
    assert (await client.call("GET", PATH)).json()["data"] == []
    text = (await client.call("GET", "/metrics")).body.decode()
    assert 'headrace_frontend_stored_responses_total{outcome="unavailable"} 1.0' in text


async def test_one_whose_answer_made_room_is_not_listed() -> None:
    client = Client()
    name = await stored(client)
    client.store.held.clear()
    assert (await client.call("GET", PATH)).json()["data"] == []
    assert (await client.call("GET", f"{PATH}/{name}")).status == 404
    assert (await client.call("DELETE", f"{PATH}/{name}")).status == 200


async def test_without_a_store_nothing_is_kept_and_nothing_found() -> None:
    app = build_frontend(FakeIngress(), FrontendSettings()).app
    assert (await post(app, chat(store=True))).status == 200
    assert (await get(app, PATH)).json()["data"] == []
    assert (await get(app, f"{PATH}/chatcmpl-x")).error["code"] == "completion_not_found"
    assert (await get(app, f"{PATH}/chatcmpl-x/messages")).status == 404
