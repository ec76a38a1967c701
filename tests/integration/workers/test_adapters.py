"""Adapters that are loaded and unloaded while workers serve: over HTTP, by command, with and without a worker that has them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client import Counter

from headrace.broker.metrics import MOVED, OPEN
from headrace.cli import main
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.metrics import PREFILL_FAILURES, PREFILLED_TOKENS
from headrace.workers.sim.tokens import expected_text
from tests.support.local_deployment import Serving, serving, sim

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
SLOW = {"decode_base_s": 0.02}
FIRST = sim("acme/one", worker_name="first", args={"adapters": ["law"], "slots": 1, "timing_overrides": SLOW})
SECOND = sim("acme/one", worker_name="second", args={"slots": 1, "timing_overrides": SLOW})

pytestmark = pytest.mark.asyncio(loop_scope="module")

Command = Callable[..., Awaitable[int]]


@pytest.fixture(scope="module")
def names() -> Subjects:
    return Subjects(f"adapt{os.getpid()}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer, names: Subjects) -> AsyncIterator[Serving]:
    async with serving(nats_server, names, FIRST, SECOND, adapter_routes=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(deployment: Serving) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=deployment.url, timeout=30) as client:
        yield client


@pytest.fixture
def command(nats_server: EmbeddedServer, names: Subjects) -> Command:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, [*words, "--nats", nats_server.url, "--prefix", names.prefix])

    return run


async def say(api: httpx.AsyncClient, model: str, max_tokens: int = 4) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    return await api.post("/v1/completions", json=body)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


def trouble(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def load(api: httpx.AsyncClient, name: str, path: str = "/adapters/x") -> httpx.Response:
    return await api.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def unload(api: httpx.AsyncClient, name: str) -> httpx.Response:
    return await api.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def listed(api: httpx.AsyncClient) -> list[str]:
    return [model["id"] for model in (await api.get("/v1/models")).json()["data"]]


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await met():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_an_adapter_that_one_worker_has_is_reached_from_all(api: httpx.AsyncClient) -> None:
    """Without a router whichever worker takes a request from the queue gives it to the one that can run it."""
    moved = _counted(MOVED, reason="adapter")
    answers = await asyncio.gather(*(say(api, "law") for _ in range(8)))
    assert {text(answer) for answer in answers} == {expected_text(PROMPT, 4, adapter="law")}
    assert _counted(MOVED, reason="adapter") == moved, "at once, not after another one has found that it cannot"


@pytest.mark.slow
async def test_an_adapter_comes_is_answered_for_and_goes(api: httpx.AsyncClient) -> None:
    assert trouble(await say(api, "sql")) == (404, "model_not_found")
    loaded = await load(api, "sql")
    assert loaded.json() == "Success: LoRA adapter 'sql' added successfully."
    await until(lambda: _is_listed(api, "sql"))
    assert text(await say(api, "sql")) == expected_text(PROMPT, 4, adapter="sql")
    assert (await load(api, "sql")).status_code == 200, "it is there, from there"
    other = await load(api, "sql", "/adapters/y")
    assert trouble(other) == (400, "adapter_refused")
    assert "2 of 2 workers refused" in other.text
    assert (await unload(api, "sql")).json() == "Success: LoRA adapter 'sql' removed successfully."
    await until(lambda: _is_unknown(api, "sql"))
    assert trouble(await unload(api, "sql")) == (404, "model_not_found")


@pytest.mark.slow
async def test_what_was_accepted_for_an_unloaded_adapter_finishes(api: httpx.AsyncClient) -> None:
    await load(api, "sql")
    await until(lambda: _is_listed(api, "sql"))
    running = [asyncio.create_task(say(api, "sql", 40)) for _ in range(2)]
    await until(lambda: _open(2))
    waiting = [asyncio.create_task(say(api, "sql", 40)) for _ in range(2)]
    await until(lambda: _open(4))
    assert (await unload(api, "sql")).status_code == 200
    for answer in await asyncio.gather(*running, *waiting):
        assert text(answer) == expected_text(PROMPT, 40, adapter="sql")
    await until(lambda: _is_unknown(api, "sql"))


@pytest.mark.slow
async def test_what_has_not_finished_in_time_goes_on_where_the_adapter_is(api: httpx.AsyncClient, command: Command) -> None:
    await load(api, "sql")
    await until(lambda: _is_listed(api, "sql"))
    running = [asyncio.create_task(say(api, "sql", 40)) for _ in range(2)]  # one on each worker
    await until(lambda: _open(2))
    assert await command("worker", "adapter", "unload", "sql", "--worker", "first", "--grace", "0") == 0
    for answer in await asyncio.gather(*running):
        assert text(answer) == expected_text(PROMPT, 40, adapter="sql")
    last = asyncio.create_task(say(api, "sql", 40))
    await until(lambda: _open(1))
    assert await command("worker", "adapter", "unload", "sql", "--worker", "second", "--grace", "0") == 0
    answer = await last
    assert trouble(answer) == (503, "no_worker")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"lora_name": "", "lora_path": "x"}, "lora_name", "empty"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path", "empty"),
        ({"lora_name": "acme/one", "lora_path": "x"}, "lora_name", "name of a model"),
        ({"lora_name": "a\x1fb", "lora_path": "x"}, "lora_path", "printable"),
        ({"lora_name": "a", "lora_path": "x", "load_inplace": True}, "load_inplace", "unload it first"),
        ({"lora_name": "a"}, "lora_path", "missing"),
        ({"lora_name": "a", "lora_path": "x", "model": "law"}, "model", "adapter itself"),
    ],
)
async def test_a_load_that_makes_no_sense_names_the_parameter(
    api: httpx.AsyncClient, body: dict[str, Any], param: str, words: str
) -> None:
    answer = await api.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


@pytest.mark.slow
async def test_by_command_on_one_worker_and_on_all(
    api: httpx.AsyncClient, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("worker", "adapter", "load", "tax", "/adapters/tax", "--worker", "second") == 0
    assert "serves 'tax'" in capsys.readouterr().out
    await until(lambda: _is_listed(api, "tax"))
    answers = await asyncio.gather(*(say(api, "tax") for _ in range(4)))
    assert {text(answer) for answer in answers} == {expected_text(PROMPT, 4, adapter="tax")}
    assert await command("model", "ls") == 0
    assert "law (1), tax (1)" in capsys.readouterr().out
    assert await command("worker", "adapter", "unload", "tax", "--worker", "first") == 1
    assert "has no adapter 'tax'; it has: law" in capsys.readouterr().err
    assert await command("worker", "adapter", "unload", "tax", "--model", "acme/one") == 0
    assert "has unloaded 'tax'" in capsys.readouterr().out
    assert await command("worker", "adapter", "unload", "tax", "--model", "acme/one") == 1
    assert "has no adapter 'tax'" in capsys.readouterr().err
    assert await command("worker", "adapter", "load", "tax", "x", "--model", "acme/nine") == 1
    assert "no model 'acme/nine' is known; known: acme/one" in capsys.readouterr().err


@pytest.mark.slow
async def test_prompts_of_an_adapter_are_computed_apart_by_those_who_have_it(
    nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, [*words, "--nats", nats_server.url, "--prefix", subjects.prefix])

    async def live(count: int) -> bool:
        options = ConnectOptions(servers=(nats_server.url,))
        async with await Connection.connect(options, subjects=subjects) as connection:
            return len(await live_workers(connection, subjects)) == count

    local = {"fabric": "local", "kv_block_bytes": 0}
    apart = {
        name: sim("apart", worker_name=name, role=name.partition("-")[0], prefill="always", args=local)
        for name in ("decode-1", "prefill-1", "prefill-2")
    }
    async with serving(nats_server, subjects, *apart.values()) as running:
        await until(lambda: live(3))
        for worker in ("decode-1", "prefill-1"):
            assert await run("worker", "adapter", "load", "sql", "x", "--worker", worker) == 0
        computed, failed = _counted(PREFILLED_TOKENS, kind="computed"), _counted(PREFILL_FAILURES)
        async with httpx.AsyncClient(base_url=running.url, timeout=30) as api:
            await until(lambda: _is_listed(api, "sql"))
            for first in range(6):
                prompt = [first, *range(100, 163)]
                body = {"model": "sql", "prompt": prompt, "max_tokens": 8, "temperature": 0}
                assert text(await api.post("/v1/completions", json=body)) == expected_text(prompt, 8, adapter="sql")
        assert _counted(PREFILLED_TOKENS, kind="computed") - computed >= 6 * 56
        assert _counted(PREFILL_FAILURES) == failed, "nobody was asked who has no such adapter"


async def test_the_routes_are_off_unless_they_are_asked_for(nats_server: EmbeddedServer, subjects: Subjects) -> None:
    async with serving(nats_server, subjects) as running, httpx.AsyncClient(base_url=running.url, timeout=30) as api:
        assert (await load(api, "sql")).status_code == 404
        assert (await unload(api, "sql")).status_code == 404


@pytest.mark.slow
async def test_a_model_without_workers_is_known_until_it_is_removed(
    nats_server: EmbeddedServer, subjects: Subjects, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, [*words, "--nats", nats_server.url, "--prefix", subjects.prefix])

    one, two = sim("acme/one", args={"adapters": ["law"]}), sim("acme/two")
    async with serving(nats_server, subjects, two, adapter_routes=True, no_worker_wait_s=0.2) as running:
        worker = await running.start(one)
        async with httpx.AsyncClient(base_url=running.url, timeout=30) as api:
            body = {"lora_name": "sql", "lora_path": "x", "model": "acme/one"}
            assert (await api.post("/v1/load_lora_adapter", json=body)).status_code == 200
            assert await run("model", "rm", "acme/one") == 1
            assert "stop them first" in capsys.readouterr().err
            await running.stop(worker, one)
            for name in ("acme/one", "law", "sql"):
                answer = await say(api, name)
                assert trouble(answer) == (503, "no_worker")
                assert int(answer.headers["retry-after"]) >= 1
            assert await run("worker", "adapter", "unload", "law", "--model", "acme/one") == 0
            assert "it is forgotten" in capsys.readouterr().out
            await until(lambda: _is_unknown(api, "law"))
            assert await run("model", "rm", "acme/one") == 0
            for name in ("acme/one", "sql"):
                await until(lambda name=name: _is_unknown(api, name))  # type: ignore[misc]
            assert await run("model", "rm", "acme/one") == 1
            assert "'acme/one' is not served here; served: acme/two" in capsys.readouterr().err
            assert await run("model", "ls", "--json") == 0
            assert [row["model"] for row in json.loads(capsys.readouterr().out)] == ["acme/two"]
            await running.start(one)  # its files were those of the other one, too
            assert text(await say(api, "law")) == expected_text(PROMPT, 4, adapter="law")


async def _is_listed(api: httpx.AsyncClient, name: str) -> bool:
    return name in await listed(api)


async def _is_unknown(api: httpx.AsyncClient, name: str) -> bool:
    return (await say(api, name)).status_code == 404


def _counted(counter: Counter, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    samples = (sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total"))
    return sum(s.value for s in samples if all(s.labels[name] == value for name, value in labels.items()))


async def _open(count: int) -> bool:
    """So many requests were accepted and have not ended."""
    (sample,) = (sample for metric in OPEN.collect() for sample in metric.samples)
    return sample.value == count
