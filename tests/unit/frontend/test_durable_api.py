"""Durable answers over HTTP: stored as a job, read from what is stored, and gone on with after a break, at any frontend."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from headrace.broker.durable.names import new_name
from headrace.broker.messages.durable import JobResult, ResultError, ResultResponse
from headrace.broker.messages.frames import JobFault
from headrace.frontend import durable_api
from headrace.frontend.apis import Stores
from headrace.frontend.app import build_frontend
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.errors import NotConnected
from tests.support.frontend.fakes import Call, FakeIngress, chat, frontend, post, say
from tests.support.frontend.stored_jobs import MemoryJobs

CHAT = "/v1/chat/completions"
ON = {"headrace-durable": "1"}


class Site:
    """Two frontends over the same stored jobs."""

    def __init__(self, *texts: str) -> None:
        self.ingress = FakeIngress(say(*(texts or ("Hello", " world"))))
        self.jobs = MemoryJobs()
        self.frontends = [build_frontend(self.ingress, FrontendSettings(), stores=Stores(jobs=self.jobs)) for _ in range(2)]

    async def ask(self, body: Any, path: str = CHAT, *, carry: bool = True, **headers: str) -> Call:
        """Ask the first frontend, and carry the job that it makes of it."""
        named = {**ON, **{name.replace("_", "-"): value for name, value in headers.items()}}
        before = len(self.jobs.published)
        call = Call(self.frontends[0].app, path, body, headers=named)
        asking = asyncio.create_task(call.run())
        while carry and len(self.jobs.published) == before and not asking.done():
            await asyncio.sleep(0)
        if carry and len(self.jobs.published) > before:
            await self.jobs.carry(self.frontends[0].renderer, self.ingress)
        await asking
        return call

    async def again(self, path: str, *, frontend: int = 1, method: str = "GET", body: Any = None, **headers: str) -> Call:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await Call(self.frontends[frontend].app, path, body, method=method, headers=named).run()


def blocks(call: Call) -> list[tuple[str, str]]:
    """The events of a stream: their ids and data."""
    found = []
    for block in call.body.decode().split("\n\n"):
        if block:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append((fields.get("id", ""), fields["data"]))
    return found


def said(events: list[tuple[str, str]]) -> str:
    return "".join(
        choice["delta"].get("content", "") for _, data in events if data != "[DONE]" for choice in json.loads(data)["choices"]
    )


async def test_a_request_without_the_header_stores_nothing() -> None:
    site = Site()
    for headers in ({}, {"headrace-durable": "0"}):
        assert (await post(site.frontends[0].app, chat(stream=True), headers=headers)).status == 200
    assert site.jobs.published == []
    assert len(site.ingress.jobs) == 2


async def test_a_stream_is_a_job_whose_events_have_ids_in_order_from_nothing() -> None:
    site = Site()
    call = await site.ask(chat(stream=True))
    assert call.status == 200
    token = call.headers["headrace-job"]
    assert site.ingress.jobs == [], "the frontend runs nothing itself"
    events = blocks(call)
    assert events.pop() == ("", "[DONE]")
    assert [name for name, _ in events] == [f"{token}.{i}" for i in range(len(events))]
    assert said(events) == "Hello world"
    plain = (await post(site.frontends[0].app, chat(stream=True))).events()[:-1]
    for one, (_, data) in zip(plain, events, strict=True):
        other = json.loads(data)
        assert {**one, "id": 0, "created": 0} == {**other, "id": 0, "created": 0}


@pytest.mark.parametrize("by", ["post", "get"])
async def test_a_client_that_comes_back_to_any_frontend_misses_nothing_and_gets_nothing_twice(by: str) -> None:
    site = Site("a", "b", "c", "d")
    whole = blocks(await site.ask(chat(stream=True)))
    token = whole[0][0].partition(".")[0]
    for cut in range(len(whole) - 1):
        last = whole[cut][0]
        if by == "post":
            call = await site.again(CHAT, method="POST", body=chat(stream=True), headrace_durable="1", last_event_id=last)
        else:
            call = await site.again(f"/v1/streams/{token}", last_event_id=last)
        assert call.status == 200
        assert blocks(call) == whole[cut + 1 :]
    assert blocks(await site.again(f"/v1/streams/{token}")) == whole
    assert len(site.jobs.published) == 1


async def test_a_follower_goes_on_while_the_stream_is_made() -> None:
    site = Site()
    name = new_name("_")
    site.jobs.append("_", name, "rows", events=[b'{"choices":[]}'])
    call = Call(site.frontends[1].app, f"/v1/streams/{name}", method="GET")
    following = asyncio.create_task(call.run())
    await call.until(lambda: call.body != b"")
    site.jobs.append("_", name, "end", status="done")
    await following
    assert [name for name, _ in blocks(call)] == [f"{name}.0", ""]


async def test_a_stream_that_has_begun_waits_for_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_api, "LOOK_S", 0.01)
    site = Site()
    name = new_name("_")
    site.jobs.append("_", name, "rows", events=[b'{"choices":[]}'])
    call = Call(site.frontends[1].app, f"/v1/streams/{name}", method="GET")
    following = asyncio.create_task(call.run())
    await call.until(lambda: call.body != b"")
    asked = asyncio.Event()

    async def away(tenant: str, token: str) -> JobResult | None:
        asked.set()
        raise NotConnected("HR_RESULT was not read")

    monkeypatch.setattr(site.jobs, "known", away)
    async with asyncio.timeout(5):
        await asked.wait()
        site.jobs.append("_", name, "end", status="done")
        await following
    assert [name for name, _ in blocks(call)] == [f"{name}.0", ""]


async def test_a_job_that_waits_in_the_queue_is_waited_for_and_one_that_never_was_is_unknown() -> None:
    site = Site()
    assert (await site.again("/v1/streams/hs-unknown")).status == 404
    name = new_name("_")
    following = asyncio.create_task(site.again(f"/v1/streams/{name}"))
    await asyncio.sleep(0.01)
    assert not following.done()
    site.jobs.append("_", name, "end", status="done", events=[b"{}"])
    assert (await following).status == 200


async def test_events_that_are_not_stored_any_more_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_api, "LOOK_AGAIN_S", 0.0)
    site = Site()
    site.jobs.end("_", JobResult(id="j1", status="done"))
    gone = await site.again("/v1/streams/j1")
    assert (gone.status, gone.error["code"]) == (410, "stream_gone")
    site.jobs.append("_", "j2", "rows", events=[b"{}"])
    site.jobs.append("_", "j2", "rows", events=[b"{}"])
    del site.jobs.entries["_", "j2"][0]  # the head of the stream has expired
    assert (await site.again("/v1/streams/j2")).status == 410


async def test_a_whole_answer_is_that_of_the_route() -> None:
    site = Site()
    call = await site.ask(chat(), idempotency_key="k")
    plain = (await post(site.frontends[0].app, chat())).json()
    answer = call.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer["id"])
    assert {**answer, "id": 0, "created": 0} == {**plain, "id": 0, "created": 0}
    assert call.headers["headrace-job"].startswith("hk-")


@pytest.mark.parametrize("header", [{"idempotency_key": "the same"}, {"headrace_job": "mine"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_request_again_is_the_same_job(header: dict[str, str], stream: bool) -> None:
    site = Site()
    first = await site.ask(chat(stream=stream), **header)
    again = await site.again(CHAT, method="POST", body=chat(stream=stream), headrace_durable="1", **header)
    assert again.body == first.body
    assert len(site.jobs.published) == 1
    other = await site.ask(chat(stream=stream), x_headrace_tenant="acme", **header)
    assert len(site.jobs.published) == 2, "ids of tenants are their own"
    assert other.status == 200


@pytest.mark.parametrize("header", [{"idempotency_key": "the same"}, {"headrace_job": "mine"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_request_under_a_name_or_key_in_use_is_refused(header: dict[str, str], stream: bool) -> None:
    site = Site()
    first = await site.ask(chat(stream=stream), **header)
    name = first.headers["headrace-job"]
    more = [{}, {"last_event_id": f"{name}.0"}] if stream else [{}]
    for came_back in more:
        other = chat(stream=stream, seed=2)
        refused = await site.again(CHAT, method="POST", body=other, headrace_durable="1", **header, **came_back)
        assert (refused.status, refused.error["code"]) == (409, "idempotency_key_reused")
        assert name in refused.error["message"]
        shuffled = dict(reversed(chat(stream=stream).items()))
        same = await site.again(CHAT, method="POST", body=shuffled, headrace_durable="1", **header, **came_back)
        assert same.status == 200, "the same request, whatever the order of its fields"
    refused = await site.again("/v1/completions", method="POST", body={"prompt": "Hi"}, headrace_durable="1", **header)
    assert refused.status == 409, "the names of all routes are the same"
    assert len(site.jobs.published) == 1


async def test_a_name_in_use_is_refused_while_its_job_waits_in_the_queue() -> None:
    site = Site()
    waiting = asyncio.create_task(site.ask(chat(), carry=False, headrace_job="mine"))
    while not site.jobs.published:
        await asyncio.sleep(0)
    refused = await site.again(CHAT, method="POST", body=chat(seed=2), headrace_durable="1", headrace_job="mine")
    assert (refused.status, refused.error["code"]) == (409, "idempotency_key_reused")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_job_of_an_older_version_is_read_on_by_its_name() -> None:
    site = Site()
    first = await site.ask(chat(), headrace_job="mine")
    site.jobs.digests.clear()  # that version stored none
    again = await site.again(CHAT, method="POST", body=chat(seed=2), headrace_durable="1", headrace_job="mine")
    assert (again.status, again.body) == (200, first.body)


async def test_a_job_that_is_refused_has_the_status_and_body_of_its_route() -> None:
    site = Site()
    body = chat(stream=True, temperature=9)
    route = await post(site.frontends[0].app, body)
    asking = asyncio.create_task(site.ask(body, carry=False))
    while not site.jobs.published:
        await asyncio.sleep(0)
    name = site.jobs.published[0].name
    error = JobFault("invalid_request", "too hot")
    site.jobs.append("_", name, "end", status="failed", fault=error, events=[b"{}"])
    await asyncio.sleep(0.01)
    response = ResultResponse(status_code=route.status or 0, request_id="x", body=msgspec.Raw(route.body))
    site.jobs.end("_", JobResult(id=name, status="failed", response=response))
    call = await asking
    assert (call.status, call.json()) == (route.status, route.json())


async def test_a_stream_that_fails_after_its_first_events_ends_with_the_error_and_no_mark_of_an_end() -> None:
    site = Site()
    asking = asyncio.create_task(site.ask(chat(stream=True), carry=False))
    while not site.jobs.published:
        await asyncio.sleep(0)
    await site.jobs.carry(site.frontends[0].renderer, site.ingress, JobFault("engine_error", "broken"))
    events = blocks(await asking)
    assert json.loads(events[-1][1])["error"]["code"] == "engine_error"


@pytest.mark.parametrize(("status", "code"), [("cancelled", "request_cancelled"), ("expired", "deadline_exceeded")])
async def test_an_end_that_no_carrier_wrote_is_told_to_a_client_in_the_middle(status: str, code: str) -> None:
    site = Site()
    name = new_name("_")
    site.jobs.append("_", name, "rows", events=[b'{"choices":[]}'])
    site.jobs.append("_", name, "end", status=status, nonce="another")
    events = blocks(await site.again(f"/v1/streams/{name}"))
    assert json.loads(events[-1][1])["error"]["code"] == code


async def test_an_end_without_an_answer_is_an_error_of_the_whole_answer() -> None:
    site = Site()
    asking = asyncio.create_task(site.ask(chat(), carry=False))
    while not site.jobs.published:
        await asyncio.sleep(0)
    error = ResultError(code="job_expired", message="too late")
    site.jobs.end("_", JobResult(id=site.jobs.published[0].name, status="expired", error=error))
    call = await asking
    assert (call.status, call.error["message"]) == (504, "too late")


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"headrace-durable": "maybe"}, "'maybe'"),
        ({**ON, "last-event-id": "12"}, "'12'"),
        ({**ON, "headrace-job": "a.b"}, "'a.b'"),
        ({**ON, "idempotency-key": "x" * 300}, "255"),
        ({**ON, "x-headrace-worker": "w1"}, "x-headrace-worker"),
    ],
)
async def test_a_wrong_header_is_refused_by_name_and_value(headers: dict[str, str], word: str) -> None:
    site = Site()
    call = await post(site.frontends[0].app, chat(), headers=headers)
    assert call.status == 400
    assert word in call.error["message"]
    assert site.jobs.published == []


async def test_without_stored_jobs_no_stream_is_known() -> None:
    app = frontend(FakeIngress()).app
    assert (await Call(app, "/v1/streams/hs-1", method="GET").run()).status == 404
