"""Open Responses: the cases of its compliance suite, answers and events checked by types made from its specification."""

from __future__ import annotations

import base64
import enum
import json
import struct
import zlib
from typing import Any, get_args

import httpx
import pytest
from conftest import CHAT, called
from openresponses_types import types
from pydantic import BaseModel


def event_types() -> dict[str, type[BaseModel]]:
    """Return the type of each event by the name that the event has on the wire."""
    found = {}
    for name, made in vars(types).items():
        if name.endswith("StreamingEvent") and isinstance(made, type) and issubclass(made, BaseModel):
            kind = made.model_fields["type"].annotation
            values = [one.value for one in kind] if isinstance(kind, enum.EnumMeta) else get_args(kind)
            found[str(values[0])] = made
    return found


EVENTS = event_types()
# the same events have another name in OpenAI's clients, which is the one that is sent
NAMES = {f"response.reasoning_text.{end}": f"response.reasoning.{end}" for end in ("delta", "done")}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


WHITE = chunk(b"IDAT", zlib.compress((b"\0" + b"\xff" * 96) * 32))  # 32 × 32
PICTURE = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)) + WHITE + chunk(b"IEND", b"")
SEEN = [
    {"type": "input_text", "text": "What is it?"},
    {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"},
]
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather at a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = called("weather", place="Oslo")


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


ALICE = said("user", "I am Alice.")
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "basic": ("Hello to you.", [said("user", "Say hello.")], {}),
    "thought": ("<think>Hm.</think>Hello.", [said("user", "Say hello.")], {}),
    "system prompt": ("Ahoy.", [said("system", "You are a pirate."), said("user", "Say hello.")], {}),
    "tool": (CALL, [said("user", "The weather in Oslo?")], {"tools": [TOOL]}),
    "image": ("White.", [said("user", SEEN)], {}),
    "multi-turn": ("Alice.", [ALICE, said("assistant", "Hello."), said("user", "Who am I?")], {}),
    "phases": ("Alice.", [ALICE, said("assistant", "Hm.", phase="commentary"), said("user", "Who am I?")], {}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_answers_and_events_are_those_of_the_specification(url: str, case: str, stream: bool) -> None:
    answer, items, more = CASES[case]
    body = {"model": CHAT, "input": items, "stream": stream, "vllm_xargs": {"sim_answer": answer}, **more}
    given = httpx.post(f"{url}/v1/responses", json=body, timeout=30)
    assert given.status_code == 200, given.text
    if stream:
        events = [json.loads(line[6:]) for line in given.text.splitlines() if line.startswith("data: {")]
        for event in events:
            name = NAMES.get(event["type"], event["type"])
            EVENTS[name].model_validate({**event, "type": name})
        final = events[-1]["response"]
        calls = [event["type"] for event in events if "function_call_arguments" in event["type"]]
        assert bool(calls) is bool(more)
        assert calls[-1:] == ["response.function_call_arguments.done"][: len(calls)]
    else:
        final = given.json()
    types.ResponseResource.model_validate(final)
    assert final["status"] == "completed"
    assert final["output"][-1]["type"] == ("function_call" if more else "message")


def test_a_key_that_is_missing_would_be_noticed(url: str) -> None:
    body = {"model": CHAT, "input": "Say hello.", "max_output_tokens": 16}
    whole = httpx.post(f"{url}/v1/responses", json=body, timeout=30).json()
    types.ResponseResource.model_validate(whole)
    for key in ("presence_penalty", "frequency_penalty", "usage", "completed_at"):
        with pytest.raises(ValueError, match=key):
            types.ResponseResource.model_validate({name: value for name, value in whole.items() if name != key})


def test_a_conversation_is_compacted(url: str) -> None:
    body = {"model": CHAT, "input": [ALICE, said("assistant", "Hello.")]}
    given = httpx.post(f"{url}/v1/responses/compact", json=body, timeout=60)
    assert given.status_code == 200, given.text
    types.CompactResource.model_validate(given.json())
