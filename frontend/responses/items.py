"""Converts items of the Responses API into the messages of a chat.

One turn of an assistant is several items (reasoning, a text, calls) and one message. The rules are those of vLLM's server.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from headrace.broker.errors import ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse
from headrace.frontend.chat_schema import Message
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.bodies import list_at, mapping_at, missing, text_at, unsupported, wrong
from headrace.frontend.ports import ResponsePort
from headrace.frontend.responses.toolset import SEARCH, Toolset, toolset_of

ItemForm = dict[str, Any]

ID_PREFIX = {
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "compaction": "cmp",
}
"""The beginning of an item's id by its type; messages have `msg`."""

_WITH_STATUS = frozenset({"message", "function_call", "function_call_output", "tool_search_call", "tool_search_output"})


def item_name(item: Mapping[str, Any], job_id: str, place: str) -> str:
    """Return an id for an item of a request. It has the id of the request's job, so that any ingress can follow it."""
    return f"{ID_PREFIX.get(item.get('type', ''), 'msg')}_{job_id}_{place}"


def listed(item: Mapping[str, Any], name: str) -> ItemForm:
    """Return an item as lists show it. `name` is the id of an item that has none."""
    kind = item.get("type") or "message"
    form: ItemForm = {**item, "type": kind, "id": item.get("id") or name}
    if kind in _WITH_STATUS and form.get("status") is None:
        form["status"] = "completed"
    if kind == "message":
        if isinstance(content := form.get("content"), str):
            form["content"] = [text_part(content, form.get("role") == "assistant")]
    elif kind == "reasoning":
        form["summary"] = form.get("summary") or []
        for key in ("content", "encrypted_content"):
            if form.get(key) is None:
                form.pop(key, None)
    return form


def text_part(text: str, by_model: bool) -> ItemForm:
    if by_model:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


# Packs summaries into items of type `compaction`, which clients send back like any other item, and reads them.
#
# The `encrypted_content` of such an item is opaque to clients and not encrypted: it is made of the client's own conversation,
# and nothing of it is kept here.

MARK = "hrc1."  # begins what this server made; the number is the version of what follows


def packed(summary: str) -> str:
    """Return the opaque content of a compaction item."""
    return MARK + base64.urlsafe_b64encode(summary.encode()).decode()


def summary_in(item: Mapping[str, Any], where: str) -> str:
    """Return the summary in a compaction item. Raises BadRequest if this server did not make it."""
    param = f"{where}.encrypted_content"
    content = item.get("encrypted_content")
    if isinstance(content, str) and content.startswith(MARK):
        try:
            return base64.b64decode(content.removeprefix(MARK), altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise BadRequest(f"invalid value for {param}: it was changed or cut since it was made", param=param) from None
    raise unsupported(param, "was made by another server and cannot be read here")


Item = Mapping[str, Any]

ROLES = ("user", "assistant", "system", "developer")
SUMMARY = "Summary of the conversation so far:\n"  # before the summary in a compaction item
KNOWN = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, tool_search_call, "
    "tool_search_output, additional_tools, reasoning, compaction and item_reference"
)
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def user_item(text: str) -> dict[str, Any]:
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
            found = toolset_of((), [(item, where)]).offers
            self._result(item, where, json.dumps({"tools": [self._toolset.offered(name, space) for space, name in found]}))
        elif kind == "additional_tools":
            toolset_of((), [(item, where)])
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


_ITEM_ID = re.compile(r"[a-z]{1,8}_(?P<job>[0-9a-f]{8,64})_(?P<place>i?[0-9]{1,9})\Z")

RESPONSE_PREFIX = "resp_"
MAX_REFERENCES = 256

HistoryItem = dict[str, Any]


class PreviousUnknown(BadRequest, code="previous_response_not_found"):
    """The response to be continued is not stored."""


class StillMade(BadRequest, code="response_in_progress"):
    """The response to be continued has not ended."""


class TooLong(BadRequest, code="conversation_too_long"):
    """The conversation has too many turns, or they are too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The conversation before a request. `chain` has the ids of its turns, `size` the bytes of its items as JSON."""

    items: list[HistoryItem] = field(default_factory=list)
    chain: list[str] = field(default_factory=list)
    size: int = 0


class History:
    """Reads conversations from the store, within limits. `store` None = nothing is stored."""

    def __init__(self, store: ResponsePort | None, *, max_turns: int, max_bytes: int) -> None:
        self._store = store
        self._max_turns = max_turns
        self._max_bytes = max_bytes

    async def before(self, previous: str | None, tenant: str) -> Past:
        """Read the conversation up to a response.

        Raises PreviousUnknown, StillMade, TooLong, and a JetStreamError if the store cannot be reached.
        """
        if previous is None:
            return Past()
        last = await self._get(previous, tenant, previous)
        if last.judge:
            raise StillMade(
                f"response {previous!r} is still being made and cannot be continued yet", param="previous_response_id"
            )
        turns = len(last.chain) + 1
        if turns > self._max_turns:
            raise self._too_long(f"{turns} turns, the limit is {self._max_turns}")
        size = last.chain_bytes + last.item_bytes
        if size > self._max_bytes:
            raise self._too_long(f"{size} bytes of items, the limit is {self._max_bytes}")
        store = self._store
        assert store is not None  # noqa: S101  # `_get` has read from it
        try:
            earlier = await store.get_all(last.chain, tenant)
        except ResponseUnknown as error:
            raise _unknown(previous, error.response_id) from None
        items: list[HistoryItem] = []
        for turn in (*earlier, last):
            items += turn.items()
            await asyncio.sleep(0)  # decoding a long turn blocks the event loop for a while
        return Past(items=items, chain=[*last.chain, last.id], size=size)

    async def items(self, given: str | Sequence[HistoryItem], past: Past, tenant: str) -> list[HistoryItem]:
        """Return the request's own items, with references replaced by their items. Raises BadRequest."""
        if isinstance(given, str):
            return [user_item(given)]
        references = [i for i, item in enumerate(given) if kind_of(item, f"input[{i}]") == "item_reference"]
        if not references:
            return list(given)
        if len(references) > MAX_REFERENCES:
            raise BadRequest(f"at most {MAX_REFERENCES} item references, got {len(references)}", param="input")
        items = list(given)
        known = {item["id"]: item for item in past.items if "id" in item}
        for i in references:
            name = text_at(given[i], "id", f"input[{i}]")
            if name not in known:
                known |= await self._around(name, tenant)
            if name not in known:
                param = f"input[{i}].id"
                raise BadRequest(f"{param}: there is no stored item {name[:100]!r}", param=param, code="item_not_found")
            items[i] = known[name]
        return items

    async def _around(self, name: str, tenant: str) -> dict[str, HistoryItem]:
        """Return all items of the turn that an item's id names."""
        match = _ITEM_ID.match(name)
        if match is None or self._store is None:
            return {}
        try:
            turn = await self._store.get(RESPONSE_PREFIX + match["job"], tenant)
        except ResponseUnknown:
            return {}
        return {item["id"]: item for item in turn.items() if "id" in item}

    async def _get(self, response_id: str, tenant: str, asked: str) -> StoredResponse:
        if self._store is None or not response_id.startswith(RESPONSE_PREFIX):
            raise _unknown(asked, response_id)
        try:
            return await self._store.get(response_id, tenant)
        except ResponseUnknown:
            raise _unknown(asked, response_id) from None

    @staticmethod
    def _too_long(what: str) -> TooLong:
        message = f"the conversation before this request has {what}; start a new one and send what matters as input"
        return TooLong(message, param="previous_response_id")


def _unknown(asked: str, missing: str) -> PreviousUnknown:
    which = "" if asked == missing else f" (of its turns {missing!r} is gone)"
    return PreviousUnknown(
        f"previous response {asked!r} cannot be continued: it is not stored{which}", param="previous_response_id"
    )


def packed_items(past: Past) -> bytes:
    """Return the items of a conversation as a record keeps them."""
    return zlib.compress(msgspec.json.encode(past.items), level=1)


def kept_past(record: StoredResponse) -> Past | None:
    """Return the conversation that a record keeps, None for one that keeps none."""
    if not record.before:
        return None
    items = msgspec.json.decode(zlib.decompress(record.before), type=list[HistoryItem])
    return Past(items=items, chain=record.chain, size=record.chain_bytes)


def named_items(items: Sequence[HistoryItem], job_id: str) -> bytes:
    """Return a request's items as JSON for the store, each with an id."""
    named = [item if item.get("id") else {**item, "id": item_name(item, job_id, f"i{i}")} for i, item in enumerate(items)]
    return msgspec.json.encode(named)
