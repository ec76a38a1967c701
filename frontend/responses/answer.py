"""The answers of the Responses API as msgspec structs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace.frontend.responses.output_items import OutputItem, Status
from headrace.frontend.responses.schema import ReasoningWishes, ResponsesRequest, TextFormat, TextWishes
from headrace.frontend.schema.answers import UNSET, UnsetType
from headrace.frontend.writers.sse import Head
from headrace.frontend.writers.usage import UsageCounter


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
    """Return the token usage of an ended answer."""
    return ResponseUsage(
        input_tokens=counter.prompt,
        input_tokens_details=InputDetails(cached_tokens=counter.cached),
        output_tokens=counter.completion,
        output_tokens_details=OutputDetails(reasoning_tokens=counter.reasoning or 0),
        total_tokens=counter.prompt + counter.completion,
    )
