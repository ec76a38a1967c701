"""Several models and an adapter behind one frontend: named, told apart, gone with their workers and back again."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.sim.tokens import expected_text
from tests.support.local_deployment import Serving, serving, sim

ONE = sim("acme/one", aliases=("small", "gpt-4o-mini"), args={"adapters": ["sql", "law"]})
TWO = sim(
    "acme/two",
    default_sampling={"temperature": 0.0},
    default_max_tokens=5,
    template_kwargs={"style": "calm"},
    args={"context_length": 4096},
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer) -> AsyncIterator[Serving]:
    async with serving(nats_server, Subjects(f"oaim{os.getpid()}"), ONE, TWO) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def say(client: AsyncOpenAI, model: str, **options: Any) -> Any:
    given = {"model": model, "prompt": [5, 6, 7, 8, 9, 10, 11, 12, 13], "max_tokens": 8, "temperature": 0, **options}
    return await client.completions.create(**given)


def expected(adapter: str | None = None) -> str:
    return expected_text([5, 6, 7, 8, 9, 10, 11, 12, 13], 8, adapter=adapter)


async def test_models_and_adapters_are_listed_and_found(client: AsyncOpenAI) -> None:
    listed = {model.id: model async for model in client.models.list()}
    assert list(listed) == ["acme/one", "acme/two", "gpt-4o-mini", "small", "law", "sql"]
    extra = {name: model.model_extra or {} for name, model in listed.items()}
    assert (extra["acme/one"]["parent"], extra["sql"]["parent"]) == (None, "acme/one")
    assert extra["acme/two"]["max_model_len"] == 4096
    assert (await client.models.retrieve("sql")).id == "sql"
    small = await client.models.retrieve("small")
    assert (small.id, (small.model_extra or {})["root"]) == ("small", "acme/one")


async def test_a_request_reaches_the_model_or_adapter_it_names(client: AsyncOpenAI) -> None:
    for name, model, adapter in (
        ("acme/one", "acme/one", None),
        ("gpt-4o-mini", "acme/one", None),
        ("sql", "sql", "sql"),
        ("law", "law", "law"),
    ):
        answer = await say(client, name)
        assert (answer.model, answer.choices[0].text) == (model, expected(adapter))
    assert len({expected(), expected("sql"), expected("law")}) == 3


async def test_an_adapter_shares_no_blocks_with_its_model(client: AsyncOpenAI) -> None:
    prompt = list(range(100, 180))
    for name in ("acme/one", "sql"):
        first = await say(client, name, prompt=prompt)
        again = await say(client, name, prompt=prompt)
        cached = [a.usage.prompt_tokens_details.cached_tokens for a in (first, again)]
        assert cached[0] == 0
        assert cached[1] > 0


async def test_defaults_are_a_models_own(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    one, again = [await client.chat.completions.create(model="acme/two", messages=messages) for _ in range(2)]
    assert one.usage is not None
    assert one.usage.completion_tokens == 5
    assert one.choices[0].message.content == again.choices[0].message.content  # temperature 0
    longer = await client.chat.completions.create(model="acme/two", messages=messages, max_tokens=9)
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 9


async def test_an_unknown_model_is_a_404_that_names_what_is_served(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await say(client, "acme/three")
    assert caught.value.code == "model_not_found"
    for name in ("acme/one", "acme/two", "sql"):
        assert name in caught.value.message


@pytest.mark.slow
async def test_a_models_name_wins_over_an_adapters(nats_server: EmbeddedServer, subjects: Subjects) -> None:
    clashing = sim("acme/one", args={"adapters": ["acme/two", "sql"]})
    async with (
        serving(nats_server, subjects, clashing, TWO) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        listed = [m["id"] for m in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["acme/one", "acme/two", "sql"]
        body = {"model": "acme/two", "prompt": [5, 6, 7, 8, 9, 10, 11, 12, 13], "max_tokens": 8, "temperature": 0}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == expected()


@pytest.mark.slow
async def test_models_vanish_and_come_back_with_their_workers(nats_server: EmbeddedServer, subjects: Subjects) -> None:
    async with (
        serving(nats_server, subjects, TWO, no_worker_wait_s=0.3) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):

        async def listed() -> list[str]:
            return [m["id"] for m in (await client.get("/v1/models")).json()["data"]]

        task = await running.start(ONE)
        assert await listed() == ["acme/one", "acme/two", "gpt-4o-mini", "small", "law", "sql"]
        await running.stop(task, ONE)
        assert await listed() == ["acme/two"]
        for name in ("acme/one", "small", "sql"):
            answer = await client.post("/v1/completions", json={"model": name, "prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert int(answer.headers["retry-after"]) >= 1
        unknown = await client.post("/v1/completions", json={"model": "never-seen", "prompt": "x"})
        assert unknown.status_code == 404
        other = await client.post("/v1/completions", json={"model": "acme/two", "prompt": "x"})
        assert other.status_code == 200
        await running.start(ONE)
        assert await listed() == ["acme/one", "acme/two", "gpt-4o-mini", "small", "law", "sql"]
        back = await client.post("/v1/completions", json={"model": "sql", "prompt": "x"})
        assert back.status_code == 200
