"""The cases of the Open Responses compliance suite, as requests of our own, against a real server and a simulated model."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.open_responses import problems
from tests.support.frontend.responses_machine import Machine
from tests.support.local_deployment import serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/open"
PICTURE = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather at a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


PICTURED = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PICTURE}]
TALK = [said("user", "I am Alice."), said("assistant", "Hello Alice."), said("user", "Who am I?")]
PHASES = [TALK[0], said("assistant", "Let me think.", phase="commentary"), said("assistant", "Alice.", phase="final_answer")]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "basic": ("Hello to you.", {"input": [said("user", "Say hello.")]}),
    "streaming": ("1 2 3 4 5", {"input": [said("user", "Count to five.")], "stream": True}),
    "system prompt": ("Ahoy.", {"input": [said("system", "You are a pirate."), said("user", "Say hello.")]}),
    "tool": (CALL, {"input": [said("user", "The weather in Oslo?")], "tools": [WEATHER]}),
    "streamed tool": (CALL, {"input": [said("user", "The weather in Oslo?")], "tools": [WEATHER], "stream": True}),
    "image": ("A picture.", {"input": [said("user", PICTURED)]}),
    "multi-turn": ("You are Alice.", {"input": TALK}),
    "phases": ("You are.", {"input": [*PHASES, said("user", "Sure?")]}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: EmbeddedServer) -> AsyncIterator[httpx.AsyncClient]:
    model = sim(MODEL, tool_parser="hermes", args={"mean_output_tokens": 40})  # for what no request prescribes
    async with (
        serving(nats_server, Subjects(f"oaop{os.getpid()}"), model) as running,
        httpx.AsyncClient(base_url=f"{running.url}/v1", timeout=30) as made,
    ):
        yield made


@pytest.mark.parametrize("case", CASES)
async def test_a_response_is_complete_in_every_key(client: httpx.AsyncClient, case: str) -> None:
    answer, asked = CASES[case]
    body = {"model": MODEL, "max_output_tokens": 200, "vllm_xargs": {"sim_answer": answer}, **asked}
    got = await client.post("/responses", json=body)
    assert got.status_code == 200, got.text
    if asked.get("stream"):
        machine = Machine()
        for line in got.text.splitlines():
            if line.startswith("data: "):
                machine.take(json.loads(line.removeprefix("data: ")))
        assert machine.ended
        response = machine.final
    else:
        response = got.json()
    assert problems(response) == []
    assert response["status"] == "completed"
    assert {item["type"] for item in response["output"]} == {"function_call" if "tools" in asked else "message"}


async def test_a_conversation_is_compacted_and_a_model_is_needed_for_it(client: httpx.AsyncClient) -> None:
    asked = {"input": TALK[:2], "prompt_cache_key": "k"}
    got = await client.post("/responses/compact", json={"model": MODEL, **asked})
    assert got.status_code == 200, got.text
    assert problems(got.json()) == []
    assert [item["type"] for item in got.json()["output"]] == ["message", "compaction"]
    refused = await client.post("/responses/compact", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
