"""Converts the messages of a chat request into the form that chat templates expect.

The rules are those of vLLM's server, so that the same request gives the same prompt: text parts are joined by newlines,
arguments of past tool calls become objects, and reasoning is given under both of its names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import missing, unsupported
from headrace.frontend.prompts.templates import ChatTemplate
from headrace.frontend.schema.chat import Message
from headrace.frontend.writers.freeform import INPUT

log = structlog.get_logger()

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a text part → the key of its text."""


def plain_messages(messages: Sequence[Message], *, parts: bool = False) -> list[dict[str, Any]]:
    """Convert messages; with `parts` their contents become lists of parts. Raises BadRequest with the path of the field."""
    return [_plain(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]


def _plain(message: Message, where: str, parts: bool) -> dict[str, Any]:
    role = message["role"]
    content = message.get("content")
    if content is None and role != "assistant":  # an assistant message may consist of tool calls alone
        raise missing(f"{where}.content")
    texts = [content] if isinstance(content, str) else _texts(content or (), where)
    plain: dict[str, Any] = {"role": role}
    if parts and role != "tool":
        plain["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        plain["content"] = texts[0] if len(texts) == 1 else "\n".join(texts)
    if role == "assistant":
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [_past_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            plain["reasoning"] = plain["reasoning_content"] = reasoning
    elif role == "tool" and (call_id := message.get("tool_call_id")) is not None:
        plain["tool_call_id"] = call_id
    if (name := message.get("name")) is not None:
        plain["name"] = name
    return plain


def _texts(parts: Sequence[Mapping[str, Any]], where: str) -> list[str]:
    return [_text(part, f"{where}.content[{j}]") for j, part in enumerate(parts)]


def _text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind is None:
        raise missing(f"{where}.type")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise unsupported(f"{where}.type", f"{str(kind)[:100]!r} is not supported here: text parts only")
    text = part.get(key, part.get("text"))
    if text is None:
        raise missing(f"{where}.{key}")
    if not isinstance(text, str):
        raise BadRequest(f"invalid value for {where}.{key}: expected a string", param=f"{where}.{key}")
    return text


def _past_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a past call as templates know it: that of a freeform tool becomes the call of the function that stands for it."""
    function: Mapping[str, Any] | None = call.get("function")
    if call.get("type") == "custom":
        custom = call.get("custom")
        if custom is None:
            raise missing(f"{where}.custom")
        function = {"name": custom["name"], "arguments": {INPUT: custom.get("input") or ""}}
        call = {key: value for key, value in call.items() if key != "custom"} | {"type": "function"}
    if function is None:
        raise missing(f"{where}.function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: str | Mapping[str, Any] | None, where: str) -> Mapping[str, Any]:
    """Parse the arguments of a past call. Invalid ones become {}, because an error would end the conversation for good."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    log.warning("tool_call.arguments_dropped", where=where, characters=len(arguments))
    return {}


# -- roles ---------------------------------------------------------------------------------------------------


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API. Some models have more, which their templates name."""

_KNOWN_ROLES = frozenset(ROLES)


def named_roles(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Check the roles, and rename `developer` to `system` for templates that know only the older name.

    Raises BadRequest for a role that neither OpenAI's API nor the template has: most templates would take any word for a role.
    """
    roles = {message["role"] for message in messages}
    if unknown := {role for role in roles - _KNOWN_ROLES if not template.knows_role(role)}:
        i, role = next((i, message["role"]) for i, message in enumerate(messages) if message["role"] in unknown)
        param = f"messages[{i}].role"
        raise BadRequest(f"invalid value for {param}: {role!r}. Supported are: {', '.join(ROLES)}", param=param)
    if "developer" not in roles or template.knows_role("developer"):
        return messages
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
