"""The `openai` client and batches: a real server, two frontends, simulated models."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.broker.batches.results import SeenResults
from headrace.broker.messages.durable import JobResult
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.codex_shape import DEPOT, hermes_call
from tests.support.local_deployment import Serving, serving, sim

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MODEL = "acme/batched"
CHAT = "/v1/chat/completions"
Clients = tuple[AsyncOpenAI, AsyncOpenAI]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontends(nats_server: EmbeddedServer) -> AsyncIterator[tuple[Serving, Serving]]:
    subjects = Subjects(f"oaiba{os.getpid()}")
    async with serving(nats_server, subjects, sim(MODEL, tool_parser="hermes")) as one, serving(nats_server, subjects) as two:
        yield one, two


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(frontends: tuple[Serving, Serving]) -> AsyncIterator[Clients]:
    """Of two frontends that share nothing but the server."""
    one, two = frontends
    async with (
        AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as first,
        AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as second,
    ):
        yield first, second


def request(number: int, **changes: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Number {number}."}],
        "max_tokens": 8,
        "vllm_xargs": {"sim_answer": f"Answer {number}."},
        **changes,
    }
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}


async def upload(client: AsyncOpenAI, requests: list[dict[str, Any]]) -> str:
    data = "".join(json.dumps(each) + "\n" for each in requests).encode()
    return (await client.files.create(file=("in.jsonl", data), purpose="batch")).id


async def ended(client: AsyncOpenAI, batch_id: str, within_s: float = 60) -> Any:
    async with asyncio.timeout(within_s):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.1)


async def lines(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


async def test_each_line_of_a_batch_is_in_the_right_file(clients: Clients) -> None:
    """200 lines, of which each seventh is refused: through one frontend in, through the other out."""
    one, two = clients
    wrong = {number for number in range(1, 201) if number % 7 == 0}
    requests = [request(number, **({"max_tokens": -1} if number in wrong else {})) for number in range(1, 201)]
    made = await one.batches.create(
        input_file_id=await upload(one, requests), endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
    )
    assert made.status == "validating"
    batch = await ended(two, made.id)
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"a": "b"})
    assert batch.request_counts.model_dump() == {"total": 200, "completed": 200 - len(wrong), "failed": len(wrong)}
    output, errors = await lines(two, batch.output_file_id), await lines(two, batch.error_file_id)
    assert set(output) == {f"c{number}" for number in range(1, 201)} - set(errors)
    assert set(errors) == {f"c{number}" for number in wrong}
    for name, line in output.items():
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["content"] == f"Answer {name[1:]}."
        assert line["error"] is None
    for line in errors.values():
        assert (line["response"]["status_code"], line["error"]) == (400, None)
        assert line["response"]["body"]["error"]["param"] == "max_tokens"
    assert batch.usage.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output.values())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Go on", "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
        ("/v1/embeddings", {"input": ["one", "two"]}),
    ],
)
async def test_other_endpoints_are_served(clients: Clients, endpoint: str, body: dict[str, Any]) -> None:
    client = clients[0]
    requests = [{"custom_id": f"c{n}", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}} for n in range(3)]
    made = await client.batches.create(
        input_file_id=await upload(client, requests),
        endpoint=endpoint,
        completion_window="30m",  # type: ignore[arg-type]
    )
    batch = await ended(client, made.id)
    assert batch.request_counts.total == 3
    output, errors = await lines(client, batch.output_file_id), await lines(client, batch.error_file_id)
    if endpoint == "/v1/embeddings":  # the model makes none, which each line is told
        assert len(errors) == 3
    else:
        assert len(output) == 3, errors
        assert all(line["response"]["body"]["model"] == MODEL for line in output.values())


async def test_tools_of_namespaces_are_called_in_lines_and_hosted_ones_left_out(clients: Clients) -> None:
    client = clients[0]
    results = [
        {"role": "user", "content": "How many nails?"},
        {"type": "function_call", "call_id": "a", "namespace": "mcp__depot", "name": "stock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "7"},
    ]
    turns: list[tuple[Any, str]] = [
        ("How many nails?", hermes_call("mcp__depot__stock", article="nail")),
        (results, hermes_call("mcp__depot__note", input="7 nails")),
    ]
    tools = [DEPOT, {"type": "web_search"}]
    common = {"model": MODEL, "tools": tools, "max_output_tokens": 400}
    requests = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/responses",
            "body": {**common, "input": items, "vllm_xargs": {"sim_answer": answer}},
        }
        for number, (items, answer) in enumerate(turns)
    ]
    refused = {**requests[0], "custom_id": "c2", "body": {**common, "input": "?", "tool_choice": {"type": "web_search"}}}
    file_id = await upload(client, [*requests, refused])
    made = await client.batches.create(input_file_id=file_id, endpoint="/v1/responses", completion_window="24h")
    batch = await ended(client, made.id)
    errors = await lines(client, batch.error_file_id)
    assert [line["response"]["body"]["error"]["param"] for line in errors.values()] == ["tool_choice.type"]
    bodies = {name: line["response"]["body"] for name, line in (await lines(client, batch.output_file_id)).items()}
    (stock,), (note,) = (bodies[name]["output"] for name in ("c0", "c1"))
    assert (stock["type"], stock["namespace"], stock["name"]) == ("function_call", "mcp__depot", "stock")
    assert json.loads(stock["arguments"]) == {"article": "nail"}
    assert (note["type"], note["namespace"], note["name"]) == ("custom_tool_call", "mcp__depot", "note")
    assert note["input"] == "7 nails"


async def test_a_wrong_file_fails_the_batch_and_names_its_lines(clients: Clients) -> None:
    client = clients[0]
    file_id = await upload(client, [request(1), request(1), {"nothing": 1}])
    made = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    batch = await ended(client, made.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(e.code, e.line) for e in batch.errors.data or []] == [
        ("duplicate_custom_id", 2),
        ("missing_required_parameter", 3),
    ]


async def test_a_file_of_more_than_50_000_lines_fails_the_batch_at_the_line_that_is_too_many(clients: Clients) -> None:
    client = clients[0]
    file_id = await upload(client, [request(number) for number in range(1, 50_002)])
    made = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    batch = await ended(client, made.id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert [(e.code, e.line) for e in batch.errors.data or []] == [("too_many_tasks", 50_001)]


async def test_a_file_that_can_be_no_batch_is_refused_with_a_code_that_the_client_shows(clients: Clients) -> None:
    client = clients[0]
    other = (await client.files.create(file=("in.jsonl", b"{}"), purpose="user_data")).id
    for file_id, code in ((other, "invalid_input_file"), ("file-none", "input_file_not_found")):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        assert (caught.value.code, caught.value.param) == (code, "input_file_id")


async def test_a_cancelled_batch_is_over_within_seconds_and_keeps_what_was_done(clients: Clients) -> None:
    one, two = clients
    requests = [request(number, max_tokens=4000, vllm_xargs={}) for number in range(1, 301)]
    made = await one.batches.create(input_file_id=await upload(one, requests), endpoint=CHAT, completion_window="24h")
    async with asyncio.timeout(20):
        while (await two.batches.retrieve(made.id)).status != "in_progress":
            await asyncio.sleep(0.05)
    await two.batches.cancel(made.id)
    batch = await ended(one, made.id, within_s=15)
    assert batch.status == "cancelled"
    output, errors = await lines(one, batch.output_file_id), await lines(one, batch.error_file_id)
    assert sorted([*output, *errors]) == sorted(f"c{number}" for number in range(1, 301))
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        await one.batches.cancel(made.id)


async def test_a_frontend_gets_the_results_of_lines_that_it_carries_itself_without_reading_them(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[int] = []
    take = SeenResults.take

    def counted(self: SeenResults, tenant: str, batch_id: str) -> dict[int, JobResult]:
        found = take(self, tenant, batch_id)
        handed.extend(found)
        return found

    monkeypatch.setattr(SeenResults, "take", counted)
    async with (
        serving(nats_server, Subjects(f"oaiown{os.getpid()}"), sim(MODEL)) as alone,
        AsyncOpenAI(base_url=f"{alone.url}/v1", api_key="none", max_retries=0) as client,
    ):
        file_id = await upload(client, [request(number) for number in range(1, 31)])
        made = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        batch = await ended(client, made.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert len(await lines(client, batch.output_file_id)) == 30
    assert handed
    assert set(handed) <= set(range(1, 31))


async def test_batches_are_listed_page_by_page(clients: Clients) -> None:
    client = clients[0].with_options(default_headers={"x-headrace-tenant": "lister"})
    file_id = await upload(client, [request(1)])
    made = [(await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")).id for _ in range(3)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]
    with pytest.raises(openai.NotFoundError):
        await clients[0].batches.retrieve(made[0])
    for batch_id in made:
        await ended(client, batch_id)
