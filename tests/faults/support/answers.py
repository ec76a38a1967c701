"""Answers of every API as data that two runs can be compared by: streams put together, ids and times left out."""

from __future__ import annotations

import json
from typing import Any

import httpx

# What differs between two runs of the same request: names, times, and which prompt blocks happened to be cached.
_OWN = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "sequence_number", "obfuscation", "signature"}
_PROMPT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_CACHED = {"cached_tokens", "prompt_tokens_details", *_PROMPT}
SSE = b"data: "


def scrubbed(value: Any) -> Any:
    """Without what may differ."""
    if isinstance(value, dict):
        told = {key: scrubbed(one) for key, one in value.items() if key not in _OWN | _CACHED}
        return told | ({"prompt": sum(value.get(key) or 0 for key in _PROMPT)} if "input_tokens" in value else {})
    if isinstance(value, list):
        return [scrubbed(one) for one in value]
    return value


class Pieces:
    """One stream. `count`: events that brought something."""

    def __init__(self) -> None:
        self.count = 0
        self._merged: dict[str, Any] = {}
        self.ended = False

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ended = True
            return
        event = json.loads(data)
        assert "error" not in event, event
        self.count += 1
        if "choices" in event:
            self._take_choices(event)
        else:
            self._take_typed(event)

    def _take_choices(self, event: dict[str, Any]) -> None:
        for choice in event.pop("choices"):
            at = f"choice {choice.pop('index')}"
            self._merge(at, choice)
        if event.get("usage") is not None:
            self._merged["usage"] = scrubbed(event["usage"])
        for key in ("object", "model"):
            self._merged[key] = event[key]

    def _take_typed(self, event: dict[str, Any]) -> None:
        kind = event.pop("type")
        if kind.endswith("delta"):
            place = ".".join(str(event.pop(key)) for key in ("output_index", "content_index", "index") if key in event)
            self._merge(f"{kind} {place}", event)
        elif kind != "ping":
            self._merged.setdefault("events", []).append([kind, scrubbed(event)])
        self.ended = self.ended or kind in ("message_stop", "response.completed", "response.incomplete")

    def _merge(self, at: str, value: Any) -> None:
        """Texts and lists grow, numbers and null are replaced; in a list, elements with an `index` are merged by it."""
        if isinstance(value, dict):
            for key, one in scrubbed(value).items() if "input_tokens" in value else value.items():
                if key not in _OWN:
                    self._merge(f"{at}.{key}", one)
        elif isinstance(value, list) and value and isinstance(value[0], dict) and "index" in value[0]:
            for one in value:
                self._merge(f"{at}[{one['index']}]", {key: part for key, part in one.items() if key != "index"})
        elif isinstance(value, str) and at.rpartition(".")[2] not in ("role", "type", "finish_reason", "stop_reason"):
            self._merged[at] = self._merged.get(at, "") + value
        elif isinstance(value, list):
            self._merged[at] = self._merged.get(at, []) + scrubbed(value)
        elif value is not None:
            self._merged[at] = value

    @property
    def whole(self) -> dict[str, Any]:
        return {key: value for key, value in self._merged.items() if value not in ("", [])}


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], pieces: Pieces) -> Any:
    """The whole answer; `pieces` fills as a stream comes."""
    if not body.get("stream"):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return scrubbed(response.json())
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                pieces.take(line[len(SSE) :].encode())
    assert pieces.ended, "the stream ended without its last event"
    return pieces.whole
