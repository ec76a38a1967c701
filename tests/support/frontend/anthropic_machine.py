"""What a stream of the Messages API must look like, as a machine that takes one event after the other.

Written from the API's description; the shapes are those of the `anthropic` package.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter

SHAPES = {
    "message_start": "RawMessageStartEvent",
    "content_block_start": "RawContentBlockStartEvent",
    "content_block_delta": "RawContentBlockDeltaEvent",
    "content_block_stop": "RawContentBlockStopEvent",
    "message_delta": "RawMessageDeltaEvent",
    "message_stop": "RawMessageStopEvent",
}
DELTAS = {"text": ("text_delta",), "thinking": ("thinking_delta", "signature_delta"), "tool_use": ("input_json_delta",)}


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    from anthropic import types  # two seconds, for those who run these tests only

    return TypeAdapter(getattr(types, SHAPES[kind]))


class Machine:
    """Feed `take`. The blocks with their texts are in `blocks`, the rest in `start` and `delta`."""

    def __init__(self) -> None:
        self.state = "new"  # new, between, inside, told, ended
        self.start: dict[str, Any] = {}
        self.delta: dict[str, Any] = {}
        self.blocks: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "ping":
            assert self.state != "new"
            return
        _adapter(kind).validate_python(event)
        if kind == "message_start":
            assert self.state == "new"
            self.start, self.state = event["message"], "between"
            assert self.start["content"] == []
            assert self.start["stop_reason"] is None
        elif kind == "content_block_start":
            assert self.state == "between"
            assert event["index"] == len(self.blocks)
            self.blocks.append(dict(event["content_block"]))
            self.texts.append("")
            self.state = "inside"
        elif kind == "content_block_delta":
            self._delta(event)
        elif kind == "content_block_stop":
            assert (self.state, event["index"]) == ("inside", len(self.blocks) - 1)
            assert self.blocks[-1]["type"] != "thinking" or self.blocks[-1]["signature"]
            self.state = "between"
        elif kind == "message_delta":
            assert self.state == "between"
            self.delta, self.state = event, "told"
            assert event["delta"]["stop_reason"] is not None
        else:
            assert (kind, self.state) == ("message_stop", "told")
            self.state = "ended"

    def _delta(self, event: dict[str, Any]) -> None:
        assert (self.state, event["index"]) == ("inside", len(self.blocks) - 1)
        block, delta = self.blocks[-1], event["delta"]
        assert delta["type"] in DELTAS[block["type"]]
        if delta["type"] == "signature_delta":
            block["signature"] = delta["signature"]
            return
        assert not block.get("signature")  # the signature comes last
        text = delta.get("text", delta.get("thinking", delta.get("partial_json")))
        assert text
        self.texts[-1] += text

    def content(self) -> list[dict[str, Any]]:
        """As the message that is not streamed has it."""
        whole = []
        for block, text in zip(self.blocks, self.texts, strict=True):
            key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
            whole.append({**block, key: json.loads(text or "{}") if key == "input" else text})
        return whole
