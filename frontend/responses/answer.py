"""The answer of the Responses API, whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace.frontend.responses.schema import ReasoningWishes, ResponsesRequest, TextFormat, TextWishes
from headrace.frontend.schema.answers import UNSET, ContentLogprob, UnsetType
from headrace.frontend.writers.content_blocks import ContentBlock
from headrace.frontend.writers.sse import Head
from headrace.frontend.writers.usage import UsageCounter

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    """What a message says."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    """What the model thought."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag="message"):
    """The model said something."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """The model thought something."""

    id: str
    status: Status
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """The model wants a function called; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """What the response cost, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response ended before its end."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseFault(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/responses`: what came out, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningWishes
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextWishes
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | UnsetType = UNSET  # once it is known
    user: str | UnsetType = UNSET
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """The answer of `GET /v1/responses/{id}/input_items`."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the request left to the model, as it was decided."""

    temperature: float
    top_p: float


def opened(request: ResponsesRequest, head: Head, sampled: Sampled, *, store: bool, background: bool = False) -> ResponseAnswer:
    """The response as it begins."""
    text = request.text or TextWishes()
    return ResponseAnswer(
        id=head.id,
        created_at=head.created,
        status="queued" if background else "in_progress",
        background=background,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=head.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or ReasoningWishes(),
        safety_identifier=request.safety_identifier,
        service_tier=request.service_tier or "default",
        store=store,
        temperature=sampled.temperature,
        text=TextWishes(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=[{"parameters": None, "strict": None, **tool} for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampled.top_p,
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
        metadata=request.metadata or {},
    )


def item_id(kind: str, job_id: str, index: int) -> str:
    """An id that says which response the item is of, so that a reference to it can be followed anywhere."""
    return f"{kind}_{job_id}_{index}"


ITEM_KINDS = {"content": "msg", "reasoning": "rs", "tool": "fc"}


def item_of(block: ContentBlock, job_id: str, status: Status, logprobs: list[ContentLogprob] | None = None) -> OutputItem:
    """A block as the item it is; while it is in progress without its text."""
    name = item_id(ITEM_KINDS[block.kind], job_id, block.index)
    begun = status == "in_progress"
    if block.kind == "content":
        content = [] if begun else [OutputText(text=block.text, logprobs=logprobs or [])]
        return MessageItem(id=name, status=status, content=content)
    if block.kind == "reasoning":
        return ReasoningItem(id=name, status=status, content=[] if begun else [ReasoningText(text=block.text)])
    arguments = "" if begun else block.text
    return FunctionCallItem(id=name, call_id=block.id, name=block.name, arguments=arguments, status=status)


def usage_of(counter: UsageCounter) -> ResponseUsage:
    """The counts of an ended answer."""
    return ResponseUsage(
        input_tokens=counter.prompt,
        input_tokens_details=InputDetails(cached_tokens=counter.cached),
        output_tokens=counter.completion,
        output_tokens_details=OutputDetails(reasoning_tokens=counter.reasoning or 0),
        total_tokens=counter.prompt + counter.completion,
    )
