"""Ollama's API and token ids in and out, on a real server with a simulated model whose answers are taken apart."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/other"
HI = [{"role": "user", "content": "How is the weather in Oslo?"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(nats_server: EmbeddedServer) -> AsyncIterator[httpx.AsyncClient]:
    model = sim(MODEL, tool_parser="hermes", reasoning_parser="think", default_max_tokens=64)
    async with (
        serving(nats_server, Subjects(f"other{os.getpid()}"), model) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        yield client


async def lines(http: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    async with http.stream("POST", path, json={"model": MODEL, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.headers["x-request-id"]
        return [json.loads(line) async for line in answer.aiter_lines()]


async def test_lines_add_up_to_the_whole_answer(http: httpx.AsyncClient) -> None:
    options = {"num_predict": 24, "temperature": 0}
    *pieces, last = await lines(http, "/api/chat", messages=HI, options=options)
    whole = (await http.post("/api/chat", json={"model": MODEL, "messages": HI, "options": options, "stream": False})).json()
    assert len(pieces) > 1
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert (last["done_reason"], last["eval_count"]) == (whole["done_reason"], whole["eval_count"]) == ("length", 24)
    assert last["prompt_eval_count"] == whole["prompt_eval_count"] > 0
    assert last["total_duration"] >= last["eval_duration"] > 0


async def test_a_prompt_is_constrained_to_a_schema(http: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
    answer = (await http.post("/api/generate", json={"model": MODEL, "prompt": "x", "format": schema, "stream": False})).json()
    assert list(json.loads(answer["response"])) == ["city"]


async def test_a_call_and_its_result_are_part_of_the_prompt(http: httpx.AsyncClient) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    turns = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "weather", "content": "-3"}]
    counts = [(await lines(http, "/api/chat", messages=asked, tools=[TOOL]))[-1]["prompt_eval_count"] for asked in (HI, turns)]
    assert counts[0] < counts[1]


async def test_ids_in_give_the_ids_that_the_text_gives(http: httpx.AsyncClient) -> None:
    text = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    ids = (await http.post("/tokenize", json={"model": MODEL, "prompt": text["prompt"]})).json()["tokens"]
    (expected,) = (await http.post("/v1/completions", json={**text, "return_token_ids": True})).json()["choices"]
    asked = {"token_ids": ids, "sampling_params": {"max_tokens": 16, "temperature": 0}, "output_mode": "text"}
    (whole,) = (await http.post("/inference/v1/generate", json=asked)).json()["choices"]
    assert (whole["token_ids"], whole["text"]) == (expected["token_ids"], expected["text"])
    streamed: list[int] = []
    async with http.stream("POST", "/inference/v1/generate", json={**asked, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["token_ids"]
    assert streamed == expected["token_ids"]
