"""Output items and answers of the Responses API as msgspec structs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace.frontend.answer_schema import UNSET, ContentLogprob, UnsetType
from headrace.frontend.generation.content_blocks import ContentBlock
from headrace.frontend.generation.sse import Head, UsageCounter
from headrace.frontend.responses.schema import ReasoningWishes, ResponsesRequest, TextFormat, TextWishes
from headrace.frontend.responses.toolset import ClientTool

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


class InputDetails(msgspec.Struct, kw_only=True):
    """Counts among the tokens of the prompt."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Counts among the tokens of the answer."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """The token usage of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """The reason of a response that is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ConversationName(msgspec.Struct, kw_only=True):
    """The conversation that a response belongs to."""

    id: str


class ResponseFault(msgspec.Struct, kw_only=True):
    """The error of a response that failed."""

    code: str
    message: str


class PlainText(msgspec.Struct, tag="text"):
    """Text of any form."""


class PlainJson(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, kw_only=True, tag="json_schema"):
    """The schema that the answer's text conforms to, with all the keys that clients expect."""

    name: str | None
    description: str | None
    schema: dict[str, Any] | None
    strict: bool


class TextInEffect(msgspec.Struct, kw_only=True):
    """The options of the answer's text in effect."""

    format: PlainText | PlainJson | SchemaFormat
    verbosity: Literal["low", "medium", "high"] | UnsetType = UNSET


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/responses`: the output, and the parameters of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    conversation: ConversationName | None = None
    error: ResponseFault | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningWishes
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextInEffect
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None  # null until the response has ended
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


class CompactedAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/responses/compact`: the user's messages, then one item with the summary of all else."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The sampling parameters in effect, from the request or the model's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def opened(request: ResponsesRequest, head: Head, sampled: Sampled, *, store: bool, background: bool = False) -> ResponseAnswer:
    """Return a response at its beginning."""
    return ResponseAnswer(
        id=head.id,
        created_at=head.created,
        status="queued" if background else "in_progress",
        background=background,
        conversation=ConversationName(id=request.conversation_id) if request.conversation_id is not None else None,
        frequency_penalty=sampled.frequency_penalty,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=head.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        presence_penalty=sampled.presence_penalty,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or ReasoningWishes(),
        safety_identifier=request.safety_identifier,
        service_tier=request.service_tier or "default",
        store=store,
        temperature=sampled.temperature,
        text=_text(request.text or TextWishes()),
        tool_choice=request.tool_choice or "auto",
        tools=[_tool(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampled.top_p,
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
        metadata=request.metadata or {},
    )


def _text(wishes: TextWishes) -> TextInEffect:
    given = wishes.format or TextFormat(type="text")
    shape: PlainText | PlainJson | SchemaFormat = PlainText() if given.type == "text" else PlainJson()
    if given.type == "json_schema":
        shape = SchemaFormat(
            name=given.name, description=given.description, schema=given.schema, strict=given.strict is not False
        )
    return TextInEffect(format=shape, verbosity=wishes.verbosity or UNSET)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with all the keys that clients expect of its type."""
    if tool.get("type") == "function":
        return {"description": None, "parameters": None, "strict": None, **tool}
    return tool


def usage_of(counter: UsageCounter) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=counter.prompt,
        input_tokens_details=InputDetails(cached_tokens=counter.cached),
        output_tokens=counter.completion,
        output_tokens_details=OutputDetails(reasoning_tokens=counter.reasoning or 0),
        total_tokens=counter.prompt + counter.completion,
    )
