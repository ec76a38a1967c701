"""Writes the events and messages of answers that the worker parsed into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.broker.messages import Part, Row
from headrace.broker.output_parts import OutputParts, parts_of
from headrace.frontend.schema.answers import UNSET, CalledFunction, ChatMessage, MessageToolCall
from headrace.frontend.writers.sse import EventWriter

_encode = msgspec.json.Encoder().encode


class ParsedWriter(EventWriter):
    """Writes the events of a parsed chat: one for each row with output, for all of its parts."""

    def events(self, rows: list[Row]) -> bytes:
        out: list[bytes] = []
        for row in rows:
            choice = row.choice
            opening = self.opening(choice)
            if opening is not None:
                out.append(opening)
            self.counter.completion += len(row.ids)
            fin = row.fin
            parts = parts_of(row.texts if fin is None or not fin.tail else [*row.texts, fin.tail])
            if parts or (row.ids and self.tells_tokens):
                out.append(self.event(choice, b'"delta":' + _encode(delta(parts)), row.ids, self.logprobs(choice, row)))
            if fin is not None:
                out.append(self.finish(choice, fin))
        return b"".join(out)


def delta(parts: Iterable[Part]) -> dict[str, Any]:
    """Return the delta of an OpenAI chunk. The first piece of a call has its id, its name and `type`."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "content":
            fields["content"] = fields.get("content", "") + part.text
        elif part.kind == "reasoning":
            fields["reasoning"] = fields["reasoning_content"] = fields.get("reasoning", "") + part.text
        else:
            call = calls.setdefault(part.index, {"index": part.index})
            function = call.setdefault("function", {})
            if part.id is not None:
                call["id"], call["type"] = part.id, "function"
            if part.name is not None:
                function["name"] = part.name
            function["arguments"] = function.get("arguments", "") + part.text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def message_of(parts: OutputParts, *, role: str, forced: bool) -> ChatMessage:
    """Return the message of a parsed answer. With `forced` a tool had to be called.

    vLLM's server then returns an empty text with the calls, otherwise none.
    """
    reasoning = parts.reasoning or None
    content: str | None = parts.content
    if not content and not forced and (parts.calls or reasoning is not None):
        content = None
    return ChatMessage(
        role=role,
        content=content,
        tool_calls=[MessageToolCall(id=c.id, function=CalledFunction(c.name, c.arguments)) for c in parts.calls] or UNSET,
        reasoning=reasoning,
        reasoning_content=reasoning,
    )
