"""Responses in the background as stored jobs: taken, carried, read, followed and cancelled by any frontend."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from headrace.broker.codec import unpack_u32
from headrace.broker.durable.errors import JobRejected
from headrace.broker.errors import Overloaded, ResponseNotStored
from headrace.broker.messages.durable import JobResult, ResultError
from headrace.broker.messages.frames import JobFault
from headrace.frontend.job_renderer import RenderedAnswer
from headrace.frontend.responses import stored
from tests.support.frontend.fakes import CARD, FILES, MODEL, TOKENIZER, Call, FakeServed, end, row
from tests.support.frontend.jobs import rendered
from tests.support.frontend.open_responses import problems
from tests.support.frontend.responses_client import Client, events_of
from tests.support.frontend.responses_machine import check_shape
from tests.support.frontend.stored_jobs import MemoryJobs


class Carrying:
    """A job in the hands of a carrier."""

    def __init__(self, jobs: MemoryJobs, token: str, answer: RenderedAnswer, nonce: str) -> None:
        self.jobs, self.token, self.answer, self.nonce = jobs, token, answer, nonce

    def say(self, text: str, *, last: bool = False) -> None:
        rows = [row(text, fin=end() if last else None)]
        self.jobs.append("_", self.token, "rows", nonce=self.nonce, rows=rows, events=self.answer.take(rows))

    async def finish(self) -> None:
        events = await self.answer.finish()
        self.jobs.append("_", self.token, "end", nonce=self.nonce, status="done", events=events)
        self.jobs.end("_", JobResult(id=self.token, status="done", response=self.answer.response()))


class Site:
    """Two frontends over the same store and jobs, and carriers that are driven by hand."""

    def __init__(self) -> None:
        self.jobs = MemoryJobs()
        self.client = Client(jobs=self.jobs)
        self.other = Client(jobs=self.jobs)
        self.other.store.held = self.client.store.held
        self.other.records.held = self.client.records.held

    async def start(self, **more: Any) -> str:
        call = await self.client.create(background=True, **more)
        assert call.status == 200, call.body
        answer = call.json()
        assert problems(answer) == []
        assert (answer["status"], answer["background"], answer["output"]) == ("queued", True, [])
        name: str = answer["id"]
        return name

    async def look(self, name: str, client: Client | None = None) -> Any:
        answer = (await (client or self.other).call("GET", f"/v1/responses/{name}")).json()
        assert problems(answer) == []
        return answer

    async def replay(self, name: str, query: str = "", client: Client | None = None) -> list[dict[str, Any]]:
        call = await (client or self.other).call("GET", f"/v1/responses/{name}?stream=true{query}")
        assert call.status == 200, call.body
        events = events_of(call)
        for event in events:
            check_shape(event)
        return events

    async def take(self, client: Client | None = None, nonce: str = "a" * 16) -> Carrying:
        answer = await rendered((client or self.other).frontend.renderer, self.jobs.job(), nonce)
        token = self.jobs.published[-1].name
        self.jobs.append("_", token, "take", nonce=nonce, carrier="i-2")
        return Carrying(self.jobs, token, answer, nonce)


def texts(answer: Any) -> list[str]:
    return [part["text"] for item in answer["output"] for part in item["content"]]


async def test_a_store_that_has_lost_it_gets_it_again_from_the_frontend_that_took_it() -> None:
    site = Site()
    name = await site.start()
    site.client.store.held.clear()
    assert (await site.other.call("GET", f"/v1/responses/{name}")).status == 404
    (store_again,) = site.client.frontend.site.on_reconnect
    await store_again()
    assert (await site.look(name))["status"] == "queued"
    assert [job.name for job in site.jobs.published] == [site.jobs.published[0].name] * 2, "its job may be lost too"
    carrying = await site.take()
    carrying.say("hello", last=True)
    await carrying.finish()
    assert texts(await site.look(name)) == ["hello"]


async def test_one_that_was_deleted_does_not_come_back() -> None:
    site = Site()
    name = await site.start()
    assert (await site.other.call("DELETE", f"/v1/responses/{name}")).status == 200
    (store_again,) = site.client.frontend.site.on_reconnect
    await store_again()
    assert (await site.client.call("GET", f"/v1/responses/{name}")).status == 404


async def test_it_is_queued_then_in_progress_then_complete_at_every_frontend() -> None:
    site = Site()
    name = await site.start()
    assert site.client.ingress.jobs == [], "the frontend that took it runs nothing"
    for client in (site.client, site.other):
        assert (await site.look(name, client))["status"] == "queued"
    early = await site.client.create(previous_response_id=name)
    assert (early.status, early.error["code"]) == (400, "response_in_progress")
    carrying = await site.take()
    carrying.say("Hello")
    assert (await site.look(name, site.client))["status"] == "in_progress"
    carrying.say(" world", last=True)
    await carrying.finish()
    for client in (site.client, site.other):
        answer = await site.look(name, client)
        assert (answer["id"], answer["status"], texts(answer)) == (name, "completed", ["Hello world"])
        assert answer["usage"]["output_tokens"] == 2
    assert (await site.client.create(previous_response_id=name)).status == 200
    assert "Hello world" in site.client.prompt()


async def test_its_events_are_followed_from_any_number_on_and_replayed_the_same_afterwards() -> None:
    site = Site()
    name = await site.start()
    live = [asyncio.create_task(site.replay(name, query, site.client)) for query in ("", "&starting_after=2")]
    elsewhere = asyncio.create_task(site.replay(name))
    carrying = await site.take()
    for text in ("Hello", " wor", "ld"):
        await asyncio.sleep(0)
        carrying.say(text, last=text == "ld")
    await carrying.finish()
    whole, part = [await task for task in live]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    kinds = [event["type"] for event in whole]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") == 3
    assert part == whole[3:]
    assert await elsewhere == whole
    assert await site.replay(name) == whole, "from its record"
    assert await site.replay(name, f"&starting_after={len(whole) - 2}") == whole[-1:]
    assert await site.replay(name, "&starting_after=9999") == []


async def test_a_second_carrier_goes_on_with_the_same_events() -> None:
    site = Site()
    name = await site.start()
    first = await site.take(nonce="a" * 16)
    first.say("Hello")
    second = await site.take(site.client, nonce="b" * 16)
    second.answer.take([row("Hello")])  # which the stream has
    second.say(" world", last=True)
    await second.finish()
    events = await site.replay(name)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert texts(await site.look(name)) == ["Hello world"]


async def test_the_head_of_a_stream_is_there_before_any_carrier_is() -> None:
    site = Site()
    call = Call(site.client.frontend.app, "/v1/responses", {"model": MODEL, "input": "hi", "background": True, "stream": True})
    task = asyncio.create_task(call.run())
    await call.until(lambda: b"response.queued" in call.body)
    call.leave()
    await task
    carrying = await site.take()
    carrying.say("all of it", last=True)
    await carrying.finish()
    (name,) = site.client.store.held
    assert texts(await site.look(name)) == ["all of it"]


async def test_it_is_cancelled_by_any_frontend_and_stays_so() -> None:
    site = Site()
    name = await site.start()
    carrying = await site.take()
    carrying.say("so far")
    following = asyncio.create_task(site.replay(name))
    for client in (site.client, site.other):
        answer = (await client.call("POST", f"/v1/responses/{name}/cancel")).json()
        assert (answer["status"], answer["output"]) == ("cancelled", [])
    last = (await following)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    carrying.answer.take([row("", fin=end())])
    await carrying.answer.finish()  # a carrier that does not know yet stores its record, and loses
    assert (await site.look(name))["status"] == "cancelled"
    assert not site.client.store.held[name].judge


async def test_a_cancel_that_comes_too_late_is_told_the_end_that_stands() -> None:
    site = Site()
    name = await site.start()
    carrying = await site.take()
    carrying.say("done", last=True)
    await carrying.finish()
    answer = (await site.client.call("POST", f"/v1/responses/{name}/cancel")).json()
    assert (answer["status"], texts(answer)) == ("completed", ["done"])


async def test_a_carrier_that_dies_between_its_end_and_the_record_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "STORE_AGAIN_S", 0.0)
    site = Site()
    name = await site.start()
    carrying = await site.take()
    carrying.say("kept", last=True)
    site.other.store.put_error = ResponseNotStored("no", reason="timeout")
    await carrying.finish()
    assert site.client.store.held[name].judge, "the record is still open"
    answer = await site.look(name, site.client)
    assert (answer["status"], texts(answer)) == ("completed", ["kept"])
    assert not site.client.store.held[name].judge
    events = await site.replay(name, client=site.client)
    assert events[-1]["type"] == "response.completed", "its events come from the stream then"
    assert (await site.client.create(previous_response_id=name)).status == 200


@pytest.mark.parametrize("status", ["expired", "poison"])
async def test_a_job_that_ended_without_an_answer_is_a_failed_response(status: str) -> None:
    site = Site()
    name = await site.start()
    token = site.jobs.published[-1].name
    site.jobs.append("_", token, "end", nonce="x", status=status, fault=JobFault("deadline_exceeded", "too late"))
    error = ResultError(code=f"job_{status}", message="too late")
    site.jobs.end("_", JobResult(id=token, status=status, error=error))  # type: ignore[arg-type]
    answer = await site.look(name)
    assert (answer["status"], answer["error"]["message"]) == ("failed", "too late")
    assert (await site.replay(name))[-1]["response"]["status"] == "failed"


async def test_one_that_is_not_accepted_is_not_stored() -> None:
    site = Site()
    site.jobs.error = Overloaded("full")
    assert (await site.client.create(background=True)).status == 429
    assert site.client.store.held == {}
    site.jobs.error = None
    site.client.store.put_error = ResponseNotStored("no", reason="unavailable")
    assert (await site.client.create(background=True)).status == 503
    assert site.jobs.published == []
    for wrong in ({"store": False}, {"temperature": 9}):
        assert (await site.client.create(background=True, **wrong)).status == 400


async def test_one_of_another_tenant_is_not_there() -> None:
    site = Site()
    name = await site.start()
    for method, path in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
        call = await site.other.call(method, f"/v1/responses/{name}{path}", x_headrace_tenant="another")
        assert call.status == 404


async def test_one_that_is_deleted_stops_and_is_forgotten() -> None:
    site = Site()
    name = await site.start()
    assert (await site.other.call("DELETE", f"/v1/responses/{name}")).json()["deleted"]
    assert site.jobs.results["_", site.jobs.published[-1].name].status == "cancelled"
    assert (await site.client.call("GET", f"/v1/responses/{name}")).status == 404


async def test_it_is_added_to_its_conversation_once_when_it_has_ended() -> None:
    site = Site()
    made = (await site.client.call("POST", "/v1/conversations", {})).json()["id"]
    name = await site.start(input="one", conversation=made)
    carrying = await site.take()
    carrying.say("Hello", last=True)
    again = await site.take(site.client, nonce="b" * 16)  # which ends it again: the first one's ack was lost
    again.answer.take([row("Hello", fin=end())])
    assert (await site.client.call("GET", f"/v1/conversations/{made}/items")).json()["data"] == []
    await carrying.finish()
    await again.answer.finish()
    items = (await site.client.call("GET", f"/v1/conversations/{made}/items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["one", "Hello"]
    assert (await site.look(name))["conversation"] == {"id": made}


async def test_one_that_was_cancelled_is_not_added_to_its_conversation() -> None:
    site = Site()
    made = (await site.client.call("POST", "/v1/conversations", {})).json()["id"]
    name = await site.start(input="one", conversation=made)
    carrying = await site.take()
    carrying.say("Hel")
    assert (await site.other.call("POST", f"/v1/responses/{name}/cancel")).status == 200
    assert (await site.client.call("GET", f"/v1/conversations/{made}/items")).json()["data"] == []


async def test_every_carrier_has_the_conversation_as_it_was_when_the_response_was_accepted() -> None:
    site = Site()
    old = {"type": "message", "role": "user", "content": "before"}
    made = (await site.client.call("POST", "/v1/conversations", {"items": [old]})).json()["id"]
    name = await site.start(input="one", conversation=made)
    late = {"type": "message", "role": "user", "content": "behind"}
    assert (await site.client.call("POST", f"/v1/conversations/{made}/items", {"items": [late]})).status == 200
    first, second = await site.take(), await site.take(site.client, nonce="b" * 16)
    prompts = [carrying.answer.requests[0].generation.token_ids for carrying in (first, second)]
    assert prompts[0] == prompts[1]
    text = str(Tokenizer.from_str(TOKENIZER.decode()).decode(unpack_u32(prompts[0]), skip_special_tokens=False))
    assert "before" in text
    assert "behind" not in text
    first.say("Hello", last=True)
    await first.finish()
    items = (await site.client.call("GET", f"/v1/conversations/{made}/items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["before", "behind", "one", "Hello"]
    assert site.client.store.held[name].before == b"", "it is kept only until the response has ended"


async def test_a_durable_job_of_a_publisher_cannot_name_a_conversation_which_nobody_keeps_as_it_was() -> None:
    site = Site()
    made = (await site.client.call("POST", "/v1/conversations", {})).json()["id"]
    await site.start(input="one", conversation=made)
    taken = site.jobs.job()
    job = msgspec.structs.replace(taken, name="my-own")
    with pytest.raises(JobRejected, match="conversation"):
        await rendered(site.client.frontend.renderer, job, "a" * 16)
    plain = msgspec.structs.replace(job, durable=False, body=job.body.replace(b'"background":true', b'"background":false'))
    await rendered(site.client.frontend.renderer, plain, "a" * 16)


@pytest.mark.parametrize("query", ["stream=true&starting_after=x", "stream=true&starting_after=-1", "starting_after=3"])
async def test_a_place_that_is_none_is_refused(query: str) -> None:
    site = Site()
    name = await site.start()
    refused = await site.other.call("GET", f"/v1/responses/{name}?{query}")
    assert (refused.status, refused.error["param"]) == (400, "starting_after")


async def test_without_stored_jobs_a_response_in_the_background_is_refused() -> None:
    call = await Client().create(background=True)
    assert (call.status, call.error["param"]) == (400, "background")


async def test_its_job_says_what_the_request_said() -> None:
    site = Site()
    await site.start(service_tier="priority")
    (job,) = site.jobs.published
    assert (job.durable, job.endpoint, job.model_slug, job.request_class) == (True, "/v1/responses", "org-tiny", "hi")
    assert json.loads(job.body)["background"] is True


async def test_tools_that_are_not_offered_count_once_however_many_job_runners_begin_it() -> None:
    site = Site()
    for client in (site.client, site.other):
        client.ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, tool_parser="hermes"), FILES)
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}]
    taken = await site.client.create(background=True, tools=tools)
    assert (taken.status, taken.headers["headrace-tools-not-offered"]) == (200, "web_search")
    series = 'headrace_frontend_tools_not_offered_total{kind="web_search"}'
    await site.take()
    await site.take(nonce="b" * 16)
    assert f"{series} 1.0" in (await site.client.call("GET", "/metrics")).body.decode()
    assert series not in (await site.other.call("GET", "/metrics")).body.decode()
