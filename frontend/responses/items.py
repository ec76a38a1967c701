"""Converts items of the Responses API into the messages of a chat.

One turn of an assistant is several items (reasoning, a text, calls) and one message. The rules are those of vLLM's server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import list_at, mapping_at, missing, text_at, unsupported, wrong
from headrace.frontend.responses.compaction_items import summary_in
from headrace.frontend.responses.toolset import SEARCH, Toolset, toolset_of
from headrace.frontend.schema.chat import Message

Item = Mapping[str, Any]

ROLES = ("user", "assistant", "system", "developer")
SUMMARY = "Summary of the conversation so far:\n"  # before the summary in a compaction item
KNOWN = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, tool_search_call, "
    "tool_search_output, additional_tools, reasoning, compaction and item_reference"
)
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def user_item(text: str) -> dict[str, Any]:
    """Return the item for an input of plain text."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def kind_of(item: Item, where: str) -> str:
    """Return the type of an item, which a message may leave out. Raises BadRequest."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind is None:
        raise missing(f"{where}.type")
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", "a string")
    return kind


class MessageBuilder:
    """Builds `messages` from items, one after the other. `where` is the path of an item, for errors."""

    def __init__(self, toolset: Toolset | None = None) -> None:
        """`toolset` names the tools of calls as the model knows them."""
        self.messages: list[Message] = []
        self._toolset = toolset or Toolset()
        self._calls: set[str] = set()

    def instruct(self, instructions: str) -> None:
        """Add a system message."""
        self.messages.append({"role": "system", "content": instructions})

    def add(self, item: Item, where: str) -> None:
        """Add an item. Raises BadRequest with the path of the field."""
        kind = kind_of(item, where)
        if kind == "message":
            self._message(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, where, freeform=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where)
        elif kind == "tool_search_call":
            self._search(item, where)
        elif kind == "tool_search_output":
            found = toolset_of((), [item]).offers
            self._result(item, where, json.dumps({"tools": [self._toolset.offered(name, space) for space, name in found]}))
        elif kind == "additional_tools":
            toolset_of((), [item])
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "compaction":
            self.messages.append({"role": "assistant", "content": SUMMARY + summary_in(item, where)})
        else:
            raise unsupported(f"{where}.type", f"{kind[:100]!r} is not supported here: {KNOWN} only")

    def _message(self, item: Item, where: str) -> None:
        role = text_at(item, "role", where)
        if role not in ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}, got {role[:100]!r}", param=f"{where}.role")
        if "content" not in item or item["content"] is None:
            raise missing(f"{where}.content")
        content = item["content"]
        if not isinstance(content, str):
            content = _parts(content, f"{where}.content")
        if role != "assistant":
            self.messages.append(cast("Message", {"role": role, "content": content}))
            return
        last = self._open(without=("content", "tool_calls"))
        last["content"] = content

    def _reasoning(self, item: Item, where: str) -> None:
        content = item.get("content") or item.get("summary") or ()
        if not content and item.get("encrypted_content") is not None:
            raise unsupported(f"{where}.encrypted_content", "cannot be read here; send the item's content instead")
        texts = [_text(part, f"{where}.content[{i}]") for i, part in enumerate(list_at(content, f"{where}.content"))]
        if texts:
            self._open(without=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = "\n".join(texts)

    def _call(self, item: Item, where: str, *, freeform: bool) -> None:
        call_id = text_at(item, "call_id", where)
        key = "input" if freeform else "arguments"
        text = item.get(key)
        if text is not None and not isinstance(text, str):
            raise wrong(f"{where}.{key}", "a string")
        name = text_at(item, "name", where)
        if not name:
            raise wrong(f"{where}.name", "the name of a tool")
        namespace = text_at(item, "namespace", where) if item.get("namespace") is not None else None
        name = self._toolset.offered(name, namespace or None)
        if freeform:
            self._made(call_id, {"type": "custom", "custom": {"name": name, "input": text or ""}})
        else:
            self._made(call_id, {"type": "function", "function": {"name": name, "arguments": text or ""}})

    def _search(self, item: Item, where: str) -> None:
        call_id = text_at(item, "call_id", where)
        given = item.get("arguments")
        arguments = given if isinstance(given, str) else json.dumps(given or {})
        name = self._toolset.offered(SEARCH, "")
        self._made(call_id, {"type": "function", "function": {"name": name, "arguments": arguments}})

    def _made(self, call_id: str, call: dict[str, Any]) -> None:
        calls = self._open(without=()).setdefault("tool_calls", [])
        assert calls is not None  # noqa: S101  # nothing here makes it None
        calls.append(cast("Any", {"id": call_id, **call}))
        self._calls.add(call_id)

    def _output(self, item: Item, where: str) -> None:
        output = item.get("output")
        if output is None:
            raise missing(f"{where}.output")
        self._result(item, where, output if isinstance(output, str) else _parts(output, f"{where}.output"))

    def _result(self, item: Item, where: str, content: str | list[dict[str, Any]]) -> None:
        call_id = text_at(item, "call_id", where)
        if call_id not in self._calls:
            param = f"{where}.call_id"
            raise BadRequest(f"{param} {call_id[:100]!r} belongs to no call before it", param=param)
        self.messages.append(cast("Message", {"role": "tool", "tool_call_id": call_id, "content": content}))

    def _open(self, *, without: Sequence[str]) -> Message:
        """Return the assistant's message to extend: the last message, unless it has one of the keys in `without`."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(key in last for key in without):
            last = cast("Message", {"role": "assistant"})
            self.messages.append(last)
        return last


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(list_at(content, where))]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = text_at(mapping_at(part, where), "type", where)
    if kind in _TEXTS:
        return {"type": "text", "text": _text(part, where)}
    if kind == "input_image":
        url = part.get("image_url")
        if url is None:
            if part.get("file_id") is not None:
                raise unsupported(f"{where}.file_id", "is not supported here; send an image_url")
            raise missing(f"{where}.image_url")
        if not isinstance(url, str):
            raise wrong(f"{where}.image_url", "a string")
        image = {"url": url}
        if isinstance(detail := part.get("detail"), str):
            image["detail"] = detail
        return {"type": "image_url", "image_url": image}
    if kind == "input_audio" and isinstance(part.get("input_audio"), Mapping):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise unsupported(f"{where}.type", f"{kind[:100]!r} is not supported here: text and images only")


def _text(part: Any, where: str) -> str:
    part = mapping_at(part, where)
    kind = part.get("type", "text")
    return text_at(part, _TEXTS.get(kind, "text") if isinstance(kind, str) else "text", where)
