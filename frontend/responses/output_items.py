"""The items of the model's output in the Responses API as msgspec structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.frontend.responses.toolset import ClientTool
from headrace.frontend.schema.answers import UNSET, ContentLogprob, UnsetType
from headrace.frontend.writers.content_blocks import ContentBlock

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    """The text of the model's reasoning."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag="message"):
    """A message of the model."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """A stretch of the model's reasoning."""

    id: str
    status: Status
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A function call by the model. `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: Status


class CustomCallItem(msgspec.Struct, kw_only=True, tag="custom_tool_call"):
    """A call of a freeform tool by the model. `input` is plain text."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str
    status: Status


class SearchCallItem(msgspec.Struct, kw_only=True, tag="tool_search_call"):
    """A search for tools by the model, which the client carries out. `arguments` that are no JSON are text."""

    id: str
    call_id: str
    execution: Literal["client"] = "client"
    arguments: Any
    status: Status


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | SearchCallItem


def item_id(kind: str, job_id: str, index: int) -> str:
    """Return the id of an item. It has the id of its job, so that any ingress can follow a reference to it."""
    return f"{kind}_{job_id}_{index}"


ITEM_KINDS = {"content": "msg", "reasoning": "rs", "function": "fc", "custom": "ctc", "tool_search": "tsc"}


def item_of(
    block: ContentBlock,
    job_id: str,
    status: Status,
    logprobs: list[ContentLogprob] | None = None,
    *,
    tool: ClientTool | None = None,
) -> OutputItem:
    """Return a block as an item, without its text while it is in progress. `tool`: the one that it calls, if it is known."""
    begun = status == "in_progress"
    if block.kind == "content":
        name = item_id(ITEM_KINDS[block.kind], job_id, block.index)
        content = [] if begun else [OutputText(text=block.text, logprobs=logprobs or [])]
        return MessageItem(id=name, status=status, content=content)
    if block.kind == "reasoning":
        name = item_id(ITEM_KINDS[block.kind], job_id, block.index)
        return ReasoningItem(id=name, status=status, content=[] if begun else [ReasoningText(text=block.text)])
    tool = tool or ClientTool("function", block.name)
    name, arguments = item_id(ITEM_KINDS[tool.kind], job_id, block.index), "" if begun else block.text
    if tool.kind == "tool_search":
        return SearchCallItem(id=name, call_id=block.id, arguments=_object(arguments), status=status)
    namespace = tool.namespace or UNSET
    if tool.kind == "custom":
        return CustomCallItem(id=name, call_id=block.id, name=tool.name, namespace=namespace, input=arguments, status=status)
    return FunctionCallItem(id=name, call_id=block.id, name=tool.name, namespace=namespace, arguments=arguments, status=status)


def _object(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments) if arguments else {}
    except msgspec.DecodeError:  # the answer was cut
        return arguments
