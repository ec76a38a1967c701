"""The same request to vLLM's own server and through Headrace, at temperature 0, gives the same answer field by field.

Both run the bundled model in float32 on vLLM.  What may differ is listed in `DIFFERENT` and `same`, with the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import openai
import pytest

from tests.engines.served.conftest import MODEL, ask_all

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LOGPROB = 1e-3  # of a log probability: the same numbers are summed in another order in another batch

DIFFERENT = {
    "id": "made by the server",
    "created": "the time",
    "system_fingerprint": "names the server's version and settings",
    "reasoning_content": "a second name of `reasoning`; vLLM 0.32 has only the new one",
    "prompt_tokens_details": "Headrace always tells what was cached, vLLM only with --enable-prompt-tokens-details",
}
"""Fields that are not compared, and why. Besides: a field that is null and one that is not there are the same."""

HI = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name"}, {"type": "text", "text": "three colours."}]},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "old": {"type": "boolean"}},
    "required": ["city", "old"],
    "additionalProperties": False,
}
CALLED = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
GREEDY = {"temperature": 1, "top_k": 1}  # for several choices, which vLLM refuses at temperature 0
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": HI},
    "parts": {"messages": TALK},
    "stream": {"messages": HI, "stream": True},
    "stream, usage": {"messages": HI, **USAGE},
    "choices": {"messages": HI, "n": 2, **GREEDY},
    "stream, choices": {"messages": HI, "n": 2, **GREEDY, **USAGE},
    "stop": {"messages": HI, "stop": ["France"]},
    "stop kept": {"messages": HI, "stop": "France", "include_stop_str_in_output": True},
    "stop, stream": {"messages": HI, "stop": ["x", "France"], **USAGE},
    "stop token": {"messages": HI, "stop_token_ids": [30]},
    "minimum": {"messages": HI, "min_tokens": 20, "max_tokens": 24},
    "to the end": {"messages": HI, "max_tokens": 200},
    "one token": {"messages": HI, "max_completion_tokens": 1},
    "penalties": {"messages": HI, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"messages": HI, "logit_bias": {"504": 50}},
    "bad words": {"messages": HI, "bad_words": [" Paris"]},
    "allowed tokens": {"messages": HI, "allowed_token_ids": [504, 260, 30]},
    "special tokens": {"messages": HI, "skip_special_tokens": False, "max_tokens": 200},
    "log probabilities": {"messages": HI, "logprobs": True, "top_logprobs": 3},
    "log probabilities, stream": {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": True},
    "tokens as ids": {"messages": HI, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    "prompt log probabilities": {"messages": HI, "prompt_logprobs": 2},
    "token ids": {"messages": HI, "return_token_ids": True},
    "token ids, stream": {"messages": HI, "return_token_ids": True, "stream": True},
    "prompt text": {"messages": HI, "return_prompt_text": True},
    "continued": {
        "messages": [*HI, {"role": "assistant", "content": "The capital"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    },
    "json": {"messages": HI, "response_format": {"type": "json_object"}, "max_tokens": 16},
    "schema": {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}},
    },
    "schema, stream": {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}},
        **USAGE,
    },
    "choice": {"messages": HI, "structured_outputs": {"choice": ["Paris", "Rome"]}},
    "regex": {"messages": HI, "structured_outputs": {"regex": "[A-Z][a-z]{4}[.]"}},
    "grammar": {"messages": HI, "structured_outputs": {"grammar": 'root ::= "Paris" | "Rome"'}},
    "tools, auto": {"messages": HI, "tools": [WEATHER, CLOCK]},
    "tools, auto, stream": {"messages": HI, "tools": [WEATHER, CLOCK], **USAGE},
    "tools, none": {"messages": HI, "tools": [WEATHER], "tool_choice": "none"},
    "tools, required": {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 80},
    "tools, required, stream": {
        "messages": HI,
        "tools": [WEATHER, CLOCK],
        "tool_choice": "required",
        "max_tokens": 80,
        **USAGE,
    },
    "tools, named": {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": NAMED},
    "tools, named, stream": {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": NAMED, **USAGE},
    "tools, cut off": {"messages": HI, "tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 3},
    "after a call": {
        "messages": [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call-1", "content": "cold"},
        ],
        "tools": [WEATHER],
    },
    "developer": {"messages": [{"role": "developer", "content": "Answer in one word."}, *HI]},
}

TEXT = "Once upon a time"
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": TEXT},
    "default length": {"prompt": TEXT, "max_tokens": None},
    "more than fits": {"prompt": [500 + i % 100 for i in range(1010)], "max_tokens": 500},  # of a context of 1024
    "stream": {"prompt": TEXT, **USAGE},
    "two prompts": {"prompt": [TEXT, "The sea"]},
    "ids": {"prompt": [12092, 28, 905]},
    "lists of ids": {"prompt": [[12092, 28, 905], [504, 5345]], "n": 2, **GREEDY},
    "choices": {"prompt": TEXT, "n": 2, **GREEDY},
    "echo": {"prompt": TEXT, "echo": True},
    "echo of ids": {"prompt": [12092, 28, 905], "echo": True},
    "echo, stream": {"prompt": TEXT, "echo": True, **USAGE},
    "echo, log probabilities": {"prompt": TEXT, "echo": True, "logprobs": 2},
    "echo, log probabilities, stream": {"prompt": TEXT, "echo": True, "logprobs": 2, **USAGE},
    "echo alone": {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 0},
    "log probabilities": {"prompt": TEXT, "logprobs": 3},
    "log probabilities, none beside": {"prompt": TEXT, "logprobs": 0},
    "log probabilities, stream": {"prompt": TEXT, "logprobs": 1, "stream": True},
    "prompt log probabilities": {"prompt": TEXT, "prompt_logprobs": 1},
    "stop": {"prompt": TEXT, "stop": ["there"], "max_tokens": 60},
    "stop, stream": {"prompt": TEXT, "stop": "there", "max_tokens": 60, **USAGE},
    "token ids": {"prompt": TEXT, "return_token_ids": True},
    "truncated": {"prompt": "word " * 50 + TEXT, "truncate_prompt_tokens": 5, "return_token_ids": True},
    "schema": {
        "prompt": TEXT,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PLACE}},
        "max_tokens": 32,
    },
    "choice": {"prompt": TEXT, "structured_outputs": {"choice": [" left", " right"]}},
}

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
REQUESTS = {CHAT: CHATS, COMPLETION: COMPLETIONS}

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown model": (CHAT, {"model": "nobody", "messages": HI}),
    "no messages": (CHAT, {}),
    "empty tools": (CHAT, {"messages": HI, "tools": []}),
    "unknown tool": (
        CHAT,
        {"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    ),
    "choice without tools": (CHAT, {"messages": HI, "tool_choice": "required"}),
    "too long": (CHAT, {"messages": HI, "max_tokens": 5000}),
    "top_p": (CHAT, {"messages": HI, "top_p": 2}),
    "top_logprobs alone": (CHAT, {"messages": HI, "top_logprobs": 3}),
    "no prompt": (COMPLETION, {}),
    "ids outside": (COMPLETION, {"prompt": [10_000_000]}),
    "prompt log probabilities of a stream": (COMPLETION, {"prompt": TEXT, "prompt_logprobs": 1, "stream": True}),
}


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    # a chat ends by itself before that; a story would go on, and a dozen tokens tell as much of it
    given = {"model": MODEL, "temperature": 0, "max_tokens": 32 if "messages" in body else 12, **body}
    if given["max_tokens"] is None or "max_completion_tokens" in given:
        del given["max_tokens"]
    # without the environment, which changes with each test while threads ask
    answer = httpx.post(url + path, json=given, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    read = _added_up(answer.text)
    if not body.get("return_token_ids"):
        for choice in read["choices"]:
            choice.pop("prompt_token_ids", None)  # vLLM tells them with a streamed echo though nobody asked
    return read


def _added_up(stream: str) -> dict[str, Any]:
    """A stream as what its events add up to: how an answer is cut into events is up to the server."""
    events = [block.removeprefix("data: ") for block in stream.split("\n\n") if block.startswith("data: ")]
    assert events.pop() == "[DONE]"
    out: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in map(json.loads, events):
        out |= {k: v for k, v in event.items() if k != "choices" and v is not None}
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "calls": {}})
            for key, value in {**part, **part.get("delta", {})}.items():
                if key == "tool_calls":
                    _add_calls(choice["calls"], value)
                elif key in ("content", "text", "reasoning") and value is not None:
                    choice[key] = choice.get(key, "") + value
                elif key == "token_ids" and value:
                    choice[key] = choice.get(key, []) + value
                elif key == "logprobs" and value:
                    held = choice.setdefault(key, {})
                    for name, items in value.items():
                        if items is not None:
                            held[name] = held.get(name, []) + items
                elif key not in ("index", "delta", "logprobs", "token_ids") and value is not None:
                    choice[key] = value
    return out | {"choices": [choices[i] for i in sorted(choices)]}


def _add_calls(calls: dict[int, dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    for piece in pieces:
        call = calls.setdefault(piece["index"], {"name": None, "arguments": ""})
        function = piece.get("function") or {}
        call["name"] = function.get("name") or call["name"]
        call["arguments"] += function.get("arguments") or ""
        call["type"] = piece.get("type") or call.get("type")


def same(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """The places where two answers differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = {k for k in (*ours, *theirs) if k not in DIFFERENT}
        return [d for name in sorted(names, key=str) for d in same(ours.get(name), theirs.get(name), f"{where}.{name}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [d for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for d in same(a, b, f"{where}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, abs_tol=LOGPROB):
        return []
    return [] if ours == theirs else [f"{where}: {ours!r} is not vLLM's {theirs!r}"]


Told = dict[tuple[str, str, str], Future[Any]]


@pytest.fixture(scope="module")
def told(ours: str, vllm: str) -> Iterator[Told]:
    """What each server answers to each request, by its path, its name and the server's URL."""
    yield from ask_all(
        lambda request: ask(request[2], request[0], REQUESTS[request[0]][request[1]]),
        [(path, name, url) for path, table in REQUESTS.items() for name in table for url in (ours, vllm)],
    )


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_the_same(told: Told, ours: str, vllm: str, name: str) -> None:
    assert same(told[CHAT, name, ours].result(), told[CHAT, name, vllm].result()) == []


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_is_the_same(told: Told, ours: str, vllm: str, name: str) -> None:
    assert same(told[COMPLETION, name, ours].result(), told[COMPLETION, name, vllm].result()) == []


@pytest.mark.parametrize("name", BAD)
def test_what_one_refuses_the_other_does_too(ours: str, vllm: str, name: str) -> None:
    path, body = BAD[name]
    told = [httpx.post(url + path, json={"model": MODEL, **body}, timeout=60) for url in (ours, vllm)]
    assert [answer.status_code for answer in told] == [told[1].status_code] * 2, [answer.text for answer in told]
    assert told[0].status_code in (400, 404)
    assert all(set(answer.json()["error"]) >= {"message", "type", "param", "code"} for answer in told)


# -- the openai client on the real model: structure, and text where a grammar forces it -----------------------


@pytest.fixture(scope="module")
def api(ours: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ours}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_client_gets_forced_calls(api: openai.OpenAI) -> None:
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in (WEATHER, CLOCK)]
    options: Any = {"model": MODEL, "messages": HI, "tools": strict, "max_tokens": 80, "temperature": 0}
    forced = api.chat.completions.create(tool_choice="required", **options).choices[0]
    assert forced.finish_reason == "tool_calls"
    assert forced.message.tool_calls
    named = api.chat.completions.create(tool_choice=NAMED, **options).choices[0]
    assert named.message.tool_calls is not None
    (call,) = named.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    with api.chat.completions.stream(tool_choice=NAMED, **options) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [c.function.arguments for c in calls] == [call.function.arguments]


def test_the_client_gets_what_a_schema_forces(api: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    answer = api.chat.completions.create(model=MODEL, messages=HI, response_format=shape, max_tokens=60, temperature=0)  # type: ignore[arg-type]
    place = json.loads(answer.choices[0].message.content or "")
    assert place["city"] in ("Paris", "Rome")
    assert isinstance(place["old"], bool)


def test_the_client_gets_log_probabilities_of_what_was_said(api: openai.OpenAI) -> None:
    for stream in (False, True):
        made: Any = api.chat.completions.create(
            model=MODEL,
            messages=HI,
            max_tokens=8,
            logprobs=True,
            top_logprobs=2,
            temperature=0,
            stream=stream,  # type: ignore[call-overload]
        )
        parts = list(made) if stream else [made]
        items = [i for p in parts for c in p.choices if c.logprobs for i in c.logprobs.content]
        assert len(items) == 8
        assert all(item.token == item.top_logprobs[0].token for item in items)  # temperature 0 takes the likeliest


def test_the_client_gets_choices_stops_and_echoes(api: openai.OpenAI) -> None:
    answer = api.completions.create(model=MODEL, prompt=TEXT, n=2, max_tokens=12, temperature=0, echo=True, stop=["\n\n\n"])
    assert len({choice.text for choice in answer.choices}) == 1
    assert all(choice.text.startswith(TEXT) for choice in answer.choices)
    again = api.completions.create(model=MODEL, prompt=[12092, 28, 905], max_tokens=4, seed=5, temperature=1)
    same_seed = api.completions.create(model=MODEL, prompt=[12092, 28, 905], max_tokens=4, seed=5, temperature=1)
    assert again.choices[0].text == same_seed.choices[0].text
