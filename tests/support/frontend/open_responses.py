"""The keys that the Open Responses specification (2026-04-24) requires of responses, items, parts and events.

The types of the `openai` package make many of them optional, so an answer can pass these types and still break clients that are
generated from the specification. Items and events that only OpenAI's API has are left to the types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

RESPONSE = frozenset(
    {
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
        *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
        *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens"),
        *("max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
    }
)
COMPACTION = frozenset({"id", "object", "output", "created_at", "usage"})
MAY_BE_NULL = frozenset(
    {
        *("completed_at", "incomplete_details", "previous_response_id", "instructions", "error", "reasoning", "usage"),
        *("max_output_tokens", "max_tool_calls", "safety_identifier", "prompt_cache_key", "conversation"),
        *("description", "parameters", "strict", "effort", "summary", "generate_summary", "name", "schema"),
    }
)
USAGE = frozenset({"input_tokens", "output_tokens", "total_tokens", "input_tokens_details", "output_tokens_details"})
ITEMS = {
    "message": frozenset({"type", "id", "status", "role", "content"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "arguments", "status"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
    "reasoning": frozenset({"type", "id", "summary"}),
    "compaction": frozenset({"type", "id", "encrypted_content"}),
}
PARTS = {
    "input_text": frozenset({"type", "text"}),
    "output_text": frozenset({"type", "text", "annotations"}),
    "reasoning_text": frozenset({"type", "text"}),
}
FUNCTION_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
SCHEMA_FORMAT = frozenset({"type", "name", "description", "schema", "strict"})
LOGPROB = frozenset({"token", "logprob", "bytes", "top_logprobs"})
_PIECE = frozenset({"type", "sequence_number", "item_id", "output_index"})
EVENTS = {
    "response.created": frozenset({"type", "sequence_number", "response"}),
    "response.queued": frozenset({"type", "sequence_number", "response"}),
    "response.in_progress": frozenset({"type", "sequence_number", "response"}),
    "response.completed": frozenset({"type", "sequence_number", "response"}),
    "response.incomplete": frozenset({"type", "sequence_number", "response"}),
    "response.failed": frozenset({"type", "sequence_number", "response"}),
    "response.output_item.added": frozenset({"type", "sequence_number", "output_index", "item"}),
    "response.output_item.done": frozenset({"type", "sequence_number", "output_index", "item"}),
    "response.content_part.added": _PIECE | {"content_index", "part"},
    "response.content_part.done": _PIECE | {"content_index", "part"},
    "response.output_text.delta": _PIECE | {"content_index", "delta", "logprobs"},
    "response.output_text.done": _PIECE | {"content_index", "text", "logprobs"},
    "response.reasoning_text.delta": _PIECE | {"content_index", "delta"},
    "response.reasoning_text.done": _PIECE | {"content_index", "text"},
    "response.function_call_arguments.delta": _PIECE | {"delta"},
    "response.function_call_arguments.done": _PIECE | {"arguments"},
}


def problems(document: dict[str, Any]) -> list[str]:
    """What the specification finds missing in a response, a compaction or an event."""
    kind = document.get("object", document.get("type"))
    if kind == "response":
        return list(_response(document, "response"))
    if kind == "response.compaction":
        return [*_keys(document, COMPACTION, "compaction"), *_usage(document, "compaction"), *_output(document, "compaction")]
    return list(_event(document))


def _event(event: dict[str, Any]) -> Iterator[str]:
    where = event["type"]
    yield from _keys(event, EVENTS.get(where, frozenset()), where)
    if "response" in event:
        yield from _response(event["response"], f"{where}.response")
    if "item" in event:
        yield from _item(event["item"], f"{where}.item")
    if "part" in event:
        yield from _part(event["part"], f"{where}.part")
    for i, logprob in enumerate(event.get("logprobs") or ()):
        yield from _keys(logprob, LOGPROB, f"{where}.logprobs[{i}]")


def _response(response: dict[str, Any], where: str) -> Iterator[str]:
    yield from _keys(response, RESPONSE, where)
    yield from _usage(response, where)
    yield from _output(response, where)
    shape = response["text"]["format"]
    if shape["type"] == "json_schema":
        yield from _keys(shape, SCHEMA_FORMAT, f"{where}.text.format")
    if response["reasoning"] is not None:
        yield from _keys(response["reasoning"], frozenset({"effort", "summary"}), f"{where}.reasoning")
    for i, tool in enumerate(response["tools"]):
        if tool["type"] == "function":
            yield from _keys(tool, FUNCTION_TOOL, f"{where}.tools[{i}]")


def _output(document: dict[str, Any], where: str) -> Iterator[str]:
    for i, item in enumerate(document["output"]):
        yield from _item(item, f"{where}.output[{i}]")


def _usage(document: dict[str, Any], where: str) -> Iterator[str]:
    if (usage := document.get("usage")) is not None:
        yield from _keys(usage, USAGE, f"{where}.usage")
        yield from _keys(usage["input_tokens_details"], frozenset({"cached_tokens"}), f"{where}.usage")
        yield from _keys(usage["output_tokens_details"], frozenset({"reasoning_tokens"}), f"{where}.usage")


def _item(item: dict[str, Any], where: str) -> Iterator[str]:
    yield from _keys(item, ITEMS.get(item["type"], frozenset()), where)
    content = item.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        yield from _part(part, f"{where}.content[{i}]")


def _part(part: dict[str, Any], where: str) -> Iterator[str]:
    yield from _keys(part, PARTS.get(part["type"], frozenset()), where)
    for i, logprob in enumerate(part.get("logprobs") or ()):
        yield from _keys(logprob, LOGPROB, f"{where}.logprobs[{i}]")


def _keys(found: dict[str, Any], wanted: frozenset[str], where: str) -> Iterator[str]:
    for key in sorted(wanted - found.keys()):
        yield f"{where} has no {key}"
    for key, value in found.items():
        if value is None and key not in MAY_BE_NULL:
            yield f"{where}.{key} is null"
