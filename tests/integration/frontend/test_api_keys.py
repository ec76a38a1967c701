"""API keys over a real nats-server: the clients of OpenAI and Anthropic, and a revocation that every frontend hears of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest

from headrace.broker.keys import CLIENT_SCOPES, KeyRecord, KeyStore
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import serving, sim

MODEL = "keyed-sim"


def wish(tenant: str, *scopes: str) -> KeyRecord:
    return KeyRecord(id="", name=tenant, tenant=tenant, hashes=[], scopes=list(scopes or CLIENT_SCOPES), created=0.0)


@contextlib.asynccontextmanager
async def keys_of(nats_server: EmbeddedServer, subjects: Subjects) -> AsyncIterator[KeyStore]:
    options = ConnectOptions(servers=(nats_server.url,), name="keys")
    async with await Connection.connect(options, subjects=subjects) as connection:
        yield KeyStore(connection, subjects)


async def test_both_clients_work_with_a_key_and_every_frontend_hears_of_its_end(
    nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    async with (
        serving(nats_server, subjects, sim(MODEL), api_key=("operator",)) as one,
        serving(nats_server, subjects, api_key=("operator",)) as two,
        keys_of(nats_server, subjects) as store,
        httpx.AsyncClient() as plain,
    ):
        record, text = await store.create(wish("acme"))
        models = {"headers": {"authorization": f"Bearer {text}"}}

        async def told(status: int) -> float:
            began = time.monotonic()
            async with asyncio.timeout(10):
                for url in (one.url, two.url):
                    while (await plain.get(f"{url}/v1/models", **models)).status_code != status:
                        await asyncio.sleep(0.01)
            return time.monotonic() - began

        await told(200)
        async with openai.AsyncOpenAI(base_url=f"{two.url}/v1", api_key=text, max_retries=0) as client:
            chat = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=False
            )
            assert chat.choices[0].message.content
            stored = await client.responses.create(model=MODEL, input="hi", max_output_tokens=4)
        async with anthropic.AsyncAnthropic(base_url=one.url, api_key=text, max_retries=0) as claude:
            message = await claude.messages.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
            assert message.usage.output_tokens == 4
        _, other = await store.create(wish("rival"))
        models["headers"] = {"authorization": f"Bearer {other}"}
        await told(200)
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=other, max_retries=0) as rival:
            with pytest.raises(openai.NotFoundError):
                await rival.responses.retrieve(stored.id)
        models["headers"] = {"authorization": f"Bearer {text}"}
        await store.revoke(record.id)
        assert await told(401) < 1.0
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=text, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with anthropic.AsyncAnthropic(base_url=one.url, api_key=text, max_retries=0) as claude:
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4)


async def test_an_answer_that_has_begun_is_finished_though_its_key_is_revoked(
    nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    slow = sim("slow-sim", args={"timing_overrides": {"decode_base_s": 0.02}})
    async with (
        serving(nats_server, subjects, slow, api_key=("operator",)) as served,
        keys_of(nats_server, subjects) as store,
        httpx.AsyncClient() as plain,
    ):
        record, text = await store.create(wish("acme"))
        headers = {"authorization": f"Bearer {text}"}

        async def told(status: int) -> None:
            async with asyncio.timeout(10):
                while (await plain.get(f"{served.url}/v1/models", headers=headers)).status_code != status:
                    await asyncio.sleep(0.01)

        await told(200)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=text, max_retries=0) as client:
            stream = await client.completions.create(
                model="slow-sim", prompt=[5, 6, 7], max_tokens=150, stream=True, extra_body={"ignore_eos": True}
            )
            chunks = [await anext(aiter(stream))]
            await store.revoke(record.id)
            await told(401)
            chunks += [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert len(chunks) > 50, "most of it came after the revocation"
