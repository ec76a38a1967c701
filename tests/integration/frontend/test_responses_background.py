"""The `openai` client and responses in the background: two frontends, and one that goes away, whose work another does."""

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
from tests.support.frontend.codex_shape import DEPOT, hermes_call
from tests.support.local_deployment import serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/slow"
STEP_S = 0.02
NOT_OFFERED = 'headrace_frontend_tools_not_offered_total{kind="web_search"}'


@pytest.fixture(scope="module")
def names() -> Subjects:
    return Subjects(f"oaib{os.getpid()}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(nats_server: EmbeddedServer, names: Subjects) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """Of two frontends that share nothing but the server."""
    model = sim(MODEL, tool_parser="hermes", args={"timing_overrides": {"decode_base_s": STEP_S}})
    async with (
        serving(nats_server, names, model) as one,
        serving(nats_server, names) as two,
        AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as first,
        AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as second,
    ):
        async with asyncio.timeout(20):
            while MODEL not in [model.id for model in (await second.models.list()).data]:
                await asyncio.sleep(STEP_S)
        yield first, second


async def begin(client: AsyncOpenAI, tokens: int, **options: Any) -> Any:
    given = {"model": MODEL, "input": "Hello?", "temperature": 0, "max_output_tokens": tokens, "background": True, **options}
    return await client.responses.create(**given)


async def until(client: AsyncOpenAI, name: str, *statuses: str) -> Any:
    async with asyncio.timeout(20):
        while (answer := await client.responses.retrieve(name)).status not in statuses:
            await asyncio.sleep(STEP_S)
    return answer


@pytest.mark.slow
async def test_a_response_is_made_while_nobody_waits_and_read_anywhere(clients: tuple[AsyncOpenAI, AsyncOpenAI]) -> None:
    first, second = clients
    made = await begin(first, 60)  # more than a second, so that it is seen under way
    assert (made.status, made.background, made.output) == ("queued", True, [])
    assert (await until(second, made.id, "in_progress")).output == []
    whole = await begin(first, 60, background=False)
    for client in clients:
        answer = await until(client, made.id, "incomplete")
        assert (answer.output_text, answer.usage.output_tokens) == (whole.output_text, 60)
    following = await begin(second, 5, previous_response_id=made.id)
    assert (await until(first, following.id, "incomplete")).previous_response_id == made.id


@pytest.mark.slow
async def test_its_events_are_read_again_from_where_a_client_was(clients: tuple[AsyncOpenAI, AsyncOpenAI]) -> None:
    first = clients[0]
    stream = await begin(first, 30, stream=True)
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 8:
            break
    await stream.close()  # the connection is gone, the response is not
    name, at = seen[0].response.id, seen[-1].sequence_number
    rest = [event async for event in await first.responses.retrieve(name, stream=True, starting_after=at)]
    every = [*seen, *rest]
    assert [event.sequence_number for event in every] == list(range(len(every)))
    assert [event.type for event in every[:3]] == ["response.created", "response.queued", "response.in_progress"]
    last = every[-1]
    assert last.type == "response.incomplete"
    said = "".join(event.delta for event in every if event.type == "response.output_text.delta")
    assert said == last.response.output_text
    for client in clients:  # from the store
        again = [event async for event in await client.responses.retrieve(name, stream=True)]
        assert [event.model_dump() for event in again] == [event.model_dump() for event in every]


async def not_offered(client: AsyncOpenAI) -> float:
    """The count of a frontend."""
    async with httpx.AsyncClient() as plain:
        metrics = (await plain.get(str(client.base_url.join("/metrics")))).text
    return sum(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(NOT_OFFERED))


@pytest.mark.slow
async def test_tools_of_namespaces_are_called_and_hosted_ones_left_out(clients: tuple[AsyncOpenAI, AsyncOpenAI]) -> None:
    first, second = clients
    tools = [DEPOT, {"type": "web_search"}]
    before = sum([await not_offered(client) for client in clients])
    answer = {"vllm_xargs": {"sim_answer": hermes_call("mcp__depot__stock", article="nail")}}
    made = await first.responses.with_raw_response.create(
        model=MODEL, input="How many nails?", background=True, tools=tools, extra_body=answer
    )
    assert made.headers["headrace-tools-not-offered"] == "web_search"
    name = made.parse().id
    (call,) = (await until(second, name, "completed")).output
    assert (call.type, call.namespace, call.name) == ("function_call", "mcp__depot", "stock")
    assert json.loads(call.arguments) == {"article": "nail"}
    events = [event async for event in await second.responses.retrieve(name, stream=True)]
    items = [event.item for event in events if event.type.startswith("response.output_item.")]
    assert [(item.namespace, item.name) for item in items] == [("mcp__depot", "stock")] * 2
    assert sum([await not_offered(client) for client in clients]) == before + 1, "once, although two frontends planned it"
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
    answer = {"vllm_xargs": {"sim_answer": "Seven."}}
    following = await begin(second, 100, input=result, tools=tools, previous_response_id=name, extra_body=answer)
    assert (await until(first, following.id, "completed")).output_text == "Seven."


@pytest.mark.slow
async def test_it_is_cancelled_through_any_frontend(clients: tuple[AsyncOpenAI, AsyncOpenAI]) -> None:
    first, second = clients
    for client in clients:
        made = await begin(first, 2000)
        await until(first, made.id, "in_progress")
        cancelled = await client.responses.cancel(made.id)
        assert (cancelled.id, cancelled.status) == (made.id, "cancelled")
        assert (await second.responses.retrieve(made.id)).status == "cancelled"


@pytest.mark.slow
async def test_one_whose_frontend_goes_away_is_made_by_another(
    nats_server: EmbeddedServer, names: Subjects, clients: tuple[AsyncOpenAI, AsyncOpenAI]
) -> None:
    first = clients[0]
    async with serving(nats_server, names) as third, AsyncOpenAI(base_url=f"{third.url}/v1", api_key="none") as client:
        made = await begin(client, 100)
        await until(first, made.id, "in_progress")
    events = [event async for event in await first.responses.retrieve(made.id, stream=True)]
    answer = await until(first, made.id, "incomplete")
    whole = await begin(first, 100, background=False)
    assert (answer.output_text, answer.usage.output_tokens) == (whole.output_text, 100)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
