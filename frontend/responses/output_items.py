"""The items of the model's output in the Responses API as msgspec structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.frontend.schema.answers import ContentLogprob
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
    arguments: str
    status: Status


class CustomCallItem(msgspec.Struct, kw_only=True, tag="custom_tool_call"):
    """A call of a freeform tool by the model. `input` is plain text."""

    id: str
    call_id: str
    name: str
    input: str
    status: Status


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


def item_id(kind: str, job_id: str, index: int) -> str:
    """Return the id of an item. It has the id of its job, so that any ingress can follow a reference to it."""
    return f"{kind}_{job_id}_{index}"


ITEM_KINDS = {"content": "msg", "reasoning": "rs", "tool": "fc"}


def item_of(
    block: ContentBlock,
    job_id: str,
    status: Status,
    logprobs: list[ContentLogprob] | None = None,
    *,
    freeform: bool = False,
) -> OutputItem:
    """Return a block as an item, without its text while it is in progress. `freeform`: it is the call of a freeform tool."""
    name = item_id("ctc" if freeform else ITEM_KINDS[block.kind], job_id, block.index)
    begun = status == "in_progress"
    if block.kind == "content":
        content = [] if begun else [OutputText(text=block.text, logprobs=logprobs or [])]
        return MessageItem(id=name, status=status, content=content)
    if block.kind == "reasoning":
        return ReasoningItem(id=name, status=status, content=[] if begun else [ReasoningText(text=block.text)])
    arguments = "" if begun else block.text
    if freeform:
        return CustomCallItem(id=name, call_id=block.id, name=block.name, input=arguments, status=status)
    return FunctionCallItem(id=name, call_id=block.id, name=block.name, arguments=arguments, status=status)
