"""Durable chats and completions over two frontends: a client that comes back to the other one misses nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/slow"
STEP_S = 0.01
ON = {"Headrace-Durable": "1"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}], "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def names() -> Subjects:
    return Subjects(f"dur{os.getpid()}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def urls(nats_server: EmbeddedServer, names: Subjects) -> AsyncIterator[tuple[str, str]]:
    """Of two frontends that share nothing but the server."""
    model = sim(MODEL, args={"timing_overrides": {"decode_base_s": STEP_S}})
    async with serving(nats_server, names, model) as one, serving(nats_server, names) as two:
        async with httpx.AsyncClient() as client, asyncio.timeout(20):
            while MODEL not in (await client.get(f"{two.url}/v1/models")).text:
                await asyncio.sleep(STEP_S)
        yield one.url, two.url


async def events(response: httpx.Response, *, most: int = 10_000) -> list[tuple[str, str]]:
    """Ids and data of a stream, of which no more than `most` are read."""
    found: list[tuple[str, str]] = []
    name = ""
    async for line in response.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "id":
            name = value
        elif field == "data":
            found.append((name, value))
            name = ""
            if len(found) == most:
                break
    return found


def said(found: list[tuple[str, str]]) -> str:
    chunks = [json.loads(data) for name, data in found if name]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def undisturbed(url: str) -> str:
    async with httpx.AsyncClient(timeout=30) as client:
        answer = (await client.post(f"{url}/v1/chat/completions", json=CHAT)).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.slow
async def test_a_client_that_is_cut_off_goes_on_at_another_frontend_token_for_token(urls: tuple[str, str]) -> None:
    first, second = urls
    body = {**CHAT, "stream": True}
    async with httpx.AsyncClient(timeout=30) as client:
        async with client.stream("POST", f"{first}/v1/chat/completions", json=body, headers=ON) as response:
            assert response.status_code == 200
            job = response.headers["headrace-job"]
            seen = await events(response, most=10)
        back = {**ON, "Last-Event-ID": seen[-1][0]}
        async with client.stream("POST", f"{second}/v1/chat/completions", json=body, headers=back) as response:
            assert response.headers["headrace-job"] == job
            rest = await events(response)
        whole = [*seen, *rest]
        assert whole[-1] == ("", "[DONE]")
        assert [name for name, _ in whole[:-1]] == [f"{job}.{i}" for i in range(len(whole) - 1)]
        assert said(whole) == await undisturbed(first)
        async with client.stream("GET", f"{second}/v1/streams/{job}") as response:
            assert await events(response) == whole
        never = await client.get(f"{second}/v1/streams/{job}", headers={"Last-Event-ID": f"{job}.{len(whole)}"})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "Last-Event-ID")
        missing = await client.get(f"{second}/v1/streams/{job}", headers={"x-headrace-tenant": "another"})
        assert missing.status_code == 404


@pytest.mark.slow
async def test_a_whole_answer_is_made_once_for_a_key(urls: tuple[str, str]) -> None:
    headers = {**ON, "Idempotency-Key": "one answer"}
    async with httpx.AsyncClient(timeout=30) as client:
        answers = [await client.post(f"{url}/v1/chat/completions", json=CHAT, headers=headers) for url in urls]
    assert answers[0].content == answers[1].content
    assert answers[0].json()["choices"][0]["message"]["content"] == await undisturbed(urls[0])


@pytest.mark.slow
async def test_of_two_requests_at_once_under_one_key_one_is_refused_at_any_frontend(urls: tuple[str, str]) -> None:
    headers = {**ON, "Headrace-Job": "one-of-two"}
    bodies = [{**CHAT, "max_tokens": tokens} for tokens in (5, 9)] * 2
    async with httpx.AsyncClient(timeout=30) as client:
        asked = [
            client.post(f"{urls[i // 2]}/v1/chat/completions", json=body, headers=headers) for i, body in enumerate(bodies)
        ]
        answers = await asyncio.gather(*asked)
    by_body = [{answer.status_code for answer in answers[i::2]} for i in range(2)]
    assert sorted(by_body, key=max) == [{200}, {409}]
    assert len({answer.content for answer in answers if answer.status_code == 200}) == 1
    assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 409} == {"idempotency_key_reused"}


@pytest.mark.slow
async def test_the_openai_client_reads_a_durable_stream_unchanged(urls: tuple[str, str]) -> None:
    async with AsyncOpenAI(base_url=f"{urls[0]}/v1", api_key="none", default_headers=ON) as client:
        given: Any = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**given)]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == await undisturbed(urls[0])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60


@pytest.mark.slow
async def test_a_refused_body_has_its_own_status(urls: tuple[str, str]) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        for stream in (False, True):
            wrong = {**CHAT, "temperature": 9, "stream": stream}
            plain = await client.post(f"{urls[0]}/v1/chat/completions", json=wrong)
            durable = await client.post(f"{urls[0]}/v1/chat/completions", json=wrong, headers=ON)
            assert (durable.status_code, durable.json()) == (plain.status_code, plain.json())
            assert plain.status_code == 400
