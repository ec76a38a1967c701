"""Writes the events and messages of answers that the worker parsed into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import msgspec

from headrace.broker.messages import Part, Row
from headrace.broker.output_parts import Call, OutputParts, parts_of
from headrace.frontend.schema.answers import (
    UNSET,
    CalledFunction,
    CalledTool,
    ChatMessage,
    MessageCustomCall,
    MessageToolCall,
)
from headrace.frontend.writers.freeform import FreeformParts, input_in
from headrace.frontend.writers.sse import AnswerOptions, EventForm, EventWriter, Head
from headrace.frontend.writers.usage import UsageCounter

_encode = msgspec.json.Encoder().encode


class ParsedWriter(EventWriter):
    """Writes the events of a parsed chat: one for each row with output, for all of its parts."""

    def __init__(self, form: EventForm, head: Head, counter: UsageCounter, *, choices: int, options: AnswerOptions) -> None:
        super().__init__(form, head, counter, choices=choices, options=options)
        self._freeform = [FreeformParts(options.freeform) for _ in range(choices)] if options.freeform else []

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
            freeform = self._freeform[choice] if self._freeform else None
            if freeform is not None:
                parts = freeform.convert(parts)
            if parts or (row.ids and self.tells_tokens):
                out.append(
                    self.event(choice, b'"delta":' + _encode(delta(parts, freeform)), row.ids, self.logprobs(choice, row))
                )
            if fin is not None:
                out.append(self.finish(choice, fin))
        return b"".join(out)


def delta(parts: Iterable[Part], freeform: FreeformParts | None = None) -> dict[str, Any]:
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
            custom = freeform is not None and freeform.took(part.index)
            kind, text = ("custom", "input") if custom else ("function", "arguments")
            called = call.setdefault(kind, {})
            if part.id is not None:
                call["id"], call["type"] = part.id, kind
            if part.name is not None:
                called["name"] = part.name
            called[text] = called.get(text, "") + part.text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def _called(call: Call, freeform: Set[str]) -> MessageToolCall | MessageCustomCall:
    if call.name in freeform:
        return MessageCustomCall(id=call.id, custom=CalledTool(call.name, input_in(call.arguments)))
    return MessageToolCall(id=call.id, function=CalledFunction(call.name, call.arguments))


def message_of(parts: OutputParts, *, role: str, forced: bool, freeform: Set[str] = frozenset()) -> ChatMessage:
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
        tool_calls=[_called(call, freeform) for call in parts.calls] or UNSET,
        reasoning=reasoning,
        reasoning_content=reasoning,
    )
