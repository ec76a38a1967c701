"""The Responses and Messages APIs on a real model: the same requests through Headrace and to vLLM's own server.

In float32, at temperature 0: everything but ids and times must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.engines.served.conftest import MODEL, ask_all
from tests.support.frontend import anthropic_machine as anthropic_machine
from tests.support.frontend import responses_machine as responses_machine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather in a city", "input_schema": CITY}
FUNCTION = {"type": "function", "name": "weather", "description": "The weather in a city", "parameters": CITY}
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
USED: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "The weather in Oslo?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "minus three"}]},
]
CALLED: list[Any] = [
    {"role": "user", "content": "The weather in Oslo?"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "minus three"},
]

MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {"messages": QUESTION},
    "system": {"messages": QUESTION, "system": [{"type": "text", "text": "Answer in "}, {"type": "text", "text": "one word."}]},
    "billing": {
        "messages": QUESTION,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}],
    },
    "stop": {"messages": QUESTION, "stop_sequences": ["is"]},
    "cut": {"messages": QUESTION, "max_tokens": 3},
    "blocks": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Name"}, {"type": "text", "text": "a colour."}]}]
    },
    "any": {"messages": QUESTION, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 120},
    "tool": {"messages": QUESTION, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 120},
    "auto": {"messages": QUESTION, "tools": [TOOL]},
    "result": {"messages": USED, "tools": [TOOL]},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"input": "What is the capital of France?"},
    "instructions": {"input": "What is the capital of France?", "instructions": "Answer in one word."},
    "cut": {"input": "What is the capital of France?", "max_output_tokens": 3},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Name a colour."}]}]},
    "schema": {
        "input": "A city?",
        "text": {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}},
    },
    "required": {"input": "The weather in Oslo?", "tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 120},
    "named": {
        "input": "The weather?",
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 120,
    },
    "auto": {"input": "The weather in Oslo?", "tools": [FUNCTION]},
    "result": {"input": CALLED, "tools": [FUNCTION]},
}
UNREADABLE = "vLLM's own server fails on arguments that are no object, which this small model may well write"


def message(url: str, request: dict[str, Any]) -> Any:
    """What is not an id or a time."""
    body = {"model": MODEL, "max_tokens": 24, "temperature": 0, **request}
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=120, trust_env=False)
    if answer.status_code == 400 and "AnthropicContentBlock" in answer.text:
        return UNREADABLE
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    content = [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in whole["content"]]
    usage = whole["usage"]
    tokens = (usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"])
    kept = {name: whole.get(name) for name in ("type", "role", "model", "stop_reason", "stop_sequence")}
    return kept | {"content": content, "tokens": tokens}


def response(url: str, request: dict[str, Any]) -> Any:
    """What is not an id or a time."""
    body = {"model": MODEL, "max_output_tokens": 24, "temperature": 0, "store": False, **request}
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    output = []
    for item in whole["output"]:
        kept = {k: v for k, v in item.items() if v is not None and k not in ("id", "call_id", "status")}
        if "content" in kept:
            kept["content"] = [{k: v for k, v in part.items() if v} for part in kept["content"]]
        output.append(kept)
    usage = whole["usage"]
    echoed = ("object", "status", "incomplete_details", "model", "instructions", "max_output_tokens", "temperature", "top_p")
    kept = {name: whole.get(name) for name in (*echoed, "parallel_tool_calls", "truncation", "previous_response_id")}
    return kept | {"output": output, "tokens": (usage["input_tokens"], usage["output_tokens"])}


Told = dict[tuple[str, str, str], Future[Any]]


@pytest.fixture(scope="module")
def told(ours: str, vllm: str) -> Iterator[Told]:
    """What each server answers to each request, by the API, the request's name and the server's URL."""
    apis = {"messages": (message, MESSAGES), "responses": (response, RESPONSES)}

    def ask(request: tuple[str, str, str]) -> Any:
        api, name, url = request
        call, requests = apis[api]
        return call(url, requests[name])

    yield from ask_all(ask, [(api, name, url) for api, (_, table) in apis.items() for name in table for url in (ours, vllm)])


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_the_one_of_vllms_server(told: Told, ours: str, vllm: str, name: str) -> None:
    answer, theirs = (told["messages", name, server].result() for server in (ours, vllm))
    if theirs is UNREADABLE:
        assert [block["type"] for block in answer["content"]] == ["tool_use"]
    else:
        assert answer == theirs


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_the_one_of_vllms_server(told: Told, ours: str, vllm: str, name: str) -> None:
    assert told["responses", name, ours].result() == told["responses", name, vllm].result()


def test_a_streamed_message_says_what_the_whole_one_does(ours: str) -> None:
    with anthropic.Anthropic(base_url=ours, api_key="none", max_retries=0) as client:
        for request in (MESSAGES["plain"], MESSAGES["any"]):
            machine = anthropic_machine.Machine()
            asked: Any = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}, **request}
            for event in client.messages.create(stream=True, **asked):
                machine.take(event.to_dict())
            assert machine.state == "ended"
            whole = message(ours, request)
            content = [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in machine.content()]
            for block in content:  # the arguments need not be an object: nothing forces this small model to write one
                if not isinstance(block.get("input", {}), dict):
                    block["input"] = {"unparsed_arguments": json.dumps(block["input"])}
            assert content == whole["content"]
            assert machine.delta["delta"]["stop_reason"] == whole["stop_reason"]


def test_a_streamed_response_says_what_the_whole_one_does(ours: str) -> None:
    with openai.OpenAI(base_url=f"{ours}/v1", api_key="none", max_retries=0) as client:
        for request in (RESPONSES["plain"], RESPONSES["required"]):
            machine = responses_machine.Machine()
            asked: Any = {"model": MODEL, "max_output_tokens": 24, "temperature": 0, **request}
            for event in client.responses.create(stream=True, **asked):
                machine.take(event.to_dict())
            assert machine.ended
            whole = client.responses.create(**asked).to_dict()
            ids = ("id", "call_id")
            plain = [{k: v for k, v in item.items() if k not in ids} for item in machine.final["output"]]
            assert plain == [{k: v for k, v in item.items() if k not in ids} for item in whole["output"]]


def test_a_conversation_goes_on_by_its_id_and_finds_its_prefix(ours: str) -> None:
    with openai.OpenAI(base_url=f"{ours}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "max_output_tokens": 24, "temperature": 0}
        first = client.responses.create(input="My name is Ada. Say hello to me.", **asked)
        second = client.responses.create(input="What is my name?", previous_response_id=first.id, **asked)
        items: list[Any] = [{"role": "user", "content": "My name is Ada. Say hello to me."}]
        items += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "What is my name?"}]
        same = client.responses.create(input=items, **asked)
        assert second.output_text == same.output_text
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_grammar_forces_what_is_said(told: Told, ours: str) -> None:
    said = told["responses", "schema", ours].result()["output"][0]["content"][0]["text"]
    assert list(json.loads(said)) == ["city"]
    (call,) = told["responses", "named", ours].result()["output"]
    assert (call["type"], call["name"]) == ("function_call", "weather")
