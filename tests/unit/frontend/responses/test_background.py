"""Responses in the background: made whether their client stays or not, looked at, streamed and cancelled from anywhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace.broker.errors import JobFailed, JobWithdrawn, Overloaded, ResponseNotStored
from tests.support.frontend.fakes import MODEL, Call, Script, end, row
from tests.support.frontend.open_responses import problems
from tests.support.frontend.responses_client import Client, events_of
from tests.support.frontend.responses_machine import check_shape

IDLE: Script = lambda _job: []  # rows are pushed by hand  # noqa: E731


@contextlib.asynccontextmanager
async def serving(script: Script | None = None, other: Client | None = None) -> AsyncIterator[Client]:
    """A frontend at work; `other` is another ingress, with the same store."""
    client = Client(script, **({} if other is None else {"strip_billing_header": True}))
    if other is not None:
        client.store.held = other.store.held
        client.ingress.id = "i-other"
    assert client.frontend.background is not None
    task = asyncio.create_task(client.frontend.background.run())
    await asyncio.sleep(0)
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not met():
            await asyncio.sleep(0.001)


async def start(client: Client, **more: Any) -> str:
    call = await client.create(background=True, **more)
    assert call.status == 200, call.body
    answer = call.json()
    assert (answer["status"], answer["background"], answer["output"]) == ("queued", True, [])
    name: str = answer["id"]
    return name


async def look(client: Client, name: str) -> Any:
    answer = (await client.call("GET", f"/v1/responses/{name}")).json()
    if "error" not in answer or "id" in answer:  # at every stage it has every key
        assert problems(answer) == []
    return answer


async def ended(client: Client, name: str) -> Any:
    await until(lambda: not client.store.held[name].judge)
    return await look(client, name)


async def replay(client: Client, name: str, query: str = "") -> list[dict[str, Any]]:
    call = await client.call("GET", f"/v1/responses/{name}?stream=true{query}")
    assert call.status == 200, call.body
    events = events_of(call)
    for event in events:
        check_shape(event)
    return events


def texts(answer: Any) -> list[str]:
    return [part["text"] for item in answer["output"] for part in item["content"]]


async def test_it_is_queued_then_in_progress_then_complete() -> None:
    async with serving(IDLE) as client:
        name = await start(client)
        assert client.store.held[name].judge == client.ingress.id
        early = await client.create(previous_response_id=name)
        assert (early.status, early.error["code"]) == (400, "response_in_progress")
        assert (await look(client, name))["status"] == "queued"
        client.ingress.answers[0].push([row("Hello")])
        await until(lambda: b'"in_progress"' in client.store.held[name].answer)
        assert (await look(client, name))["status"] == "in_progress"
        client.ingress.answers[0].push([row(" world", fin=end())])
        answer = await ended(client, name)
        assert (answer["status"], texts(answer), answer["usage"]["output_tokens"]) == ("completed", ["Hello world"], 2)
        await start(client, previous_response_id=name)
        assert "Hello world" in client.prompt()


async def test_its_events_can_be_read_from_any_number_on_while_it_is_made_and_afterwards_anywhere() -> None:
    async with serving(IDLE) as client, serving(other=client) as other:
        name = await start(client)
        live = [asyncio.create_task(replay(client, name, query)) for query in ("", "&starting_after=2")]
        elsewhere = asyncio.create_task(replay(other, name))
        for text in ("Hello", " wor", "ld"):
            await asyncio.sleep(0.01)
            client.ingress.answers[0].push([row(text, fin=end() if text == "ld" else None)])
        whole, part = [await task for task in live]
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        kinds = [event["type"] for event in whole]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert [whole[i]["response"]["status"] for i in range(3)] == ["queued", "queued", "in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_text.delta") == 3
        assert part == whole[3:]
        assert await elsewhere == whole, "another ingress has them as soon as it has ended"
        await ended(client, name)
        for reader in (client, other):
            assert await replay(reader, name) == whole
            assert await replay(reader, name, f"&starting_after={len(whole) - 2}") == whole[-1:]
            assert await replay(reader, name, "&starting_after=9999") == []


async def test_a_client_that_streams_and_leaves_misses_nothing() -> None:
    async with serving(IDLE) as client:
        call = Call(client.frontend.app, "/v1/responses", {"model": MODEL, "input": "hi", "background": True, "stream": True})
        task = asyncio.create_task(call.run())
        await call.until(lambda: b"response.queued" in call.body)
        name = next(iter(client.store.held))
        call.leave()
        await task
        assert not client.ingress.answers[0].cancelled
        client.ingress.answers[0].push([row("all of it", fin=end())])
        assert texts(await ended(client, name)) == ["all of it"]


async def test_it_is_cancelled_where_it_is_made() -> None:
    async with serving(IDLE) as client:
        name = await start(client)
        live = asyncio.create_task(replay(client, name))
        client.ingress.answers[0].push([row("so far")])
        await until(lambda: b'"in_progress"' in client.store.held[name].answer)
        for _ in range(2):  # the second time nothing changes
            answer = (await client.call("POST", f"/v1/responses/{name}/cancel")).json()
            assert (answer["status"], answer["output"]) == ("cancelled", [])
        assert client.ingress.answers[0].cancelled
        last = (await live)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
        assert (await look(client, name))["status"] == "cancelled"


async def test_it_is_cancelled_through_another_ingress() -> None:
    async with serving(IDLE) as client, serving(other=client) as other:
        name = await start(client)
        cancelling = asyncio.create_task(other.call("POST", f"/v1/responses/{name}/cancel"))
        await until(lambda: bool(other.ingress.asked_to_cancel))
        assert other.ingress.asked_to_cancel == [(name.removeprefix("resp_"), "_")]
        client.ingress.answers[0].push(JobWithdrawn())  # what the asked ingress does to its job
        assert (await cancelling).json()["status"] == "cancelled"


async def test_what_has_ended_stays_as_it_is() -> None:
    async with serving() as client:
        name = await start(client)
        await ended(client, name)
        assert (await client.call("POST", f"/v1/responses/{name}/cancel")).json()["status"] == "completed"
        plain = (await client.create()).json()
        refused = await client.call("POST", f"/v1/responses/{plain['id']}/cancel")
        assert (refused.status, refused.error["param"]) == (400, "response_id")
        unstreamed = await client.call("GET", f"/v1/responses/{plain['id']}?stream=true")
        assert (unstreamed.status, unstreamed.error["param"]) == (400, "stream")


async def test_one_whose_ingress_has_died_ends_as_failed() -> None:
    async with serving(IDLE) as client, serving(other=client) as other:
        name = await start(client)
        assert (await look(other, name))["status"] == "queued"
        other.ingress.dead.add(client.ingress.id)
        answer = await look(other, name)
        assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")
        assert not other.store.held[name].judge
        events = await other.call("GET", f"/v1/responses/{name}?stream=true")
        assert (events.status, events.error["code"]) == (400, "events_not_kept")


async def test_what_is_not_through_when_the_process_ends_is_said_to_have_failed() -> None:
    async with serving(IDLE) as client:
        name = await start(client)
    answer = await look(client, name)
    assert (answer["status"], "stopped" in answer["error"]["message"]) == ("failed", True)
    assert client.ingress.answers[0].cancelled
    assert (await client.create(background=True)).status == 503, "nothing runs any more"


async def test_a_job_that_fails_leaves_a_failed_response() -> None:
    async with serving(lambda _job: [[row("a")], JobFailed("the engine broke")]) as client:
        answer = await ended(client, await start(client))
        assert answer["status"] == "failed"
        assert "the engine broke" in answer["error"]["message"]


async def test_one_that_is_not_accepted_is_not_stored() -> None:
    async with serving() as client:
        client.ingress.refusal = Overloaded("full")
        assert (await client.create(background=True)).status == 429
        client.ingress.refusal = None
        client.store.put_error = ResponseNotStored("no", reason="unavailable")
        assert (await client.create(background=True)).status == 503
        assert (client.store.held, len(client.ingress.answers)) == ({}, 0)
        refused = await client.create(background=True, store=False)
        assert (refused.status, refused.error["param"]) == (400, "background")


async def test_the_end_is_stored_once_the_store_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.frontend.responses.background.STORE_AGAIN_S", 0.001)
    async with serving(IDLE) as client:
        name = await start(client)
        client.store.put_error = ResponseNotStored("no", reason="timeout")
        client.ingress.answers[0].push([row("late", fin=end())])
        await until(lambda: client.frontend.metrics.stored.labels("timeout")._value.get() > 2)
        assert (await look(client, name))["status"] == "completed", "this ingress knows"
        client.store.put_error = None
        assert texts(await ended(client, name)) == ["late"]


async def test_one_that_is_deleted_stops_and_does_not_come_back() -> None:
    async with serving(IDLE) as client:
        name = await start(client)
        assert (await client.call("DELETE", f"/v1/responses/{name}")).json()["deleted"]
        assert client.ingress.answers[0].cancelled
        assert (client.store.held, (await client.call("GET", f"/v1/responses/{name}")).status) == ({}, 404)


@pytest.mark.parametrize("query", ["stream=true&starting_after=x", "stream=true&starting_after=-1", "starting_after=3"])
async def test_a_place_that_is_none_is_refused(query: str) -> None:
    async with serving() as client:
        name = await start(client)
        refused = await client.call("GET", f"/v1/responses/{name}?{query}")
        assert (refused.status, refused.error["param"]) == (400, "starting_after")


async def test_a_response_whose_record_was_lost_is_there_while_it_is_made_and_its_record_again_after_a_reconnect() -> None:
    async with serving(IDLE) as client, serving(other=client) as other:
        name = await start(client)
        client.store.held.clear()  # the store was deleted under it
        assert (await look(client, name))["status"] == "queued"
        assert (await client.call("GET", f"/v1/responses/{name}", x_headrace_tenant="another")).status == 404
        assert (await other.call("GET", f"/v1/responses/{name}")).status == 404
        assert client.frontend.background is not None
        await client.frontend.background.store_again()
        assert (await look(other, name))["status"] == "queued"
        client.ingress.answers[0].push([row("Hello", fin=end())])
        assert texts(await ended(client, name)) == ["Hello"]
        await client.frontend.background.store_again()
        assert texts(await look(other, name)) == ["Hello"], "a record that has ended is not overwritten"


async def test_a_record_written_again_never_follows_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(IDLE) as client:
        name = await start(client)
        put, order, slow = client.store.put, [], asyncio.Event()

        async def delayed(record: Any) -> None:
            order.append(bool(record.judge))
            if record.judge:
                await slow.wait()
            await put(record)

        monkeypatch.setattr(client.store, "put", delayed)
        assert client.frontend.background is not None
        again = asyncio.create_task(client.frontend.background.store_again())
        await until(lambda: order == [True])
        client.ingress.answers[0].push([row("Hello", fin=end())])
        await asyncio.sleep(0.01)
        slow.set()
        await again
        assert texts(await ended(client, name)) == ["Hello"]
        assert order[-1] is False


@pytest.mark.parametrize("deleted", [False, True])
async def test_it_is_added_to_its_conversation_when_it_has_ended(deleted: bool) -> None:
    async with serving(IDLE) as client:
        made = (await client.call("POST", "/v1/conversations", {})).json()["id"]
        name = await start(client, input="one", conversation=made)
        client.ingress.answers[0].push([row("Hello")])
        await until(lambda: "in_progress" in client.store.held[name].answer.decode())
        assert (await client.call("GET", f"/v1/conversations/{made}/items")).json()["data"] == []
        if deleted:
            client.records.held.clear()
        client.ingress.answers[0].push([row("", ids=[], fin=end("stop"))])
        answer = await ended(client, name)
        assert (answer["status"], answer["store"]) == ("completed", True)
        assert answer["conversation"] == (None if deleted else {"id": made})
        if not deleted:
            items = (await client.call("GET", f"/v1/conversations/{made}/items?order=asc")).json()["data"]
            assert [item["content"][0]["text"] for item in items] == ["one", "Hello"]


async def test_one_that_was_cancelled_is_not_added_to_its_conversation() -> None:
    async with serving(IDLE) as client:
        made = (await client.call("POST", "/v1/conversations", {})).json()["id"]
        name = await start(client, input="one", conversation=made)
        await client.call("POST", f"/v1/responses/{name}/cancel")
        assert (await look(client, name))["status"] == "cancelled"
        assert (await client.call("GET", f"/v1/conversations/{made}/items")).json()["data"] == []
