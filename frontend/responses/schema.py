"""Requests of the Responses API, and records of conversations, as msgspec structs.

Names and ranges are OpenAI's, plus the additions of vLLM's server. Items and tools stay mappings: their fields depend on their
type, and the translation names the path of a wrong field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.answer_schema import Metadata
from headrace.frontend.chat_schema import (
    MAX_LOGPROBS,
    Int64,
    MetadataKey,
    MetadataValue,
    Nvext,
    Penalty,
    Positive,
    ReasoningEffort,
    StructuredOutputs,
    TokenId,
)

Items = list[dict[str, Any]]

HINTS = ("client_metadata", "prompt_cache_options", "moderation", "background_options", "access_programs", "image")  # no effect


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextWishes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Options of the answer's text. `verbosity` is accepted and returned, and has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningWishes(msgspec.Struct, kw_only=True):
    """Options of reasoning. `effort` goes to the chat template. `summary` is accepted; reasoning is always returned in full."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ConversationChoice(msgspec.Struct, kw_only=True):
    """The conversation that a response belongs to."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]


class ConversationInput(msgspec.Struct, kw_only=True):
    """The fields that become the prompt, which are all that counting needs."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # None = the only one that is served
    input: str | Items
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    conversation: str | ConversationChoice | None = None
    prompt: Any = None
    context_management: Any = None
    tools: Items | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWishes | None = None
    text: TextWishes | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationChoice) else given


class ResponsesRequest(ConversationInput, kw_only=True):
    """A response to be made."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # of built-in tools, which there are none of
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    include_reasoning: bool | None = None
    # vLLM's additions
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    session_id: Annotated[str, Meta(max_length=512)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    vllm_xargs: dict[str, Any] | None = None
    nvext: Nvext | None = None


class InputTokensRequest(ConversationInput, kw_only=True):
    """A prompt to be counted."""

    input: str | Items | None = None  # type: ignore[assignment]  # instructions or a previous response are enough


class CompactRequest(msgspec.Struct, kw_only=True):
    """A conversation to be compacted."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]  # needed here, as the Open Responses suite checks
    input: str | Items | None = None  # none: the conversation that `previous_response_id` names
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None


MAX_NEW_ITEMS = 20  # in one request, as OpenAI has it

NewItems = Annotated[list[dict[str, Any]], Meta(max_length=MAX_NEW_ITEMS)]


class ItemBatch(msgspec.Struct, kw_only=True):
    """Items that were added together. `name` is that of their object in the store, `items` the ids of those still there."""

    name: str
    items: list[str]
    size: int  # bytes of all its items as JSON


class ConversationRecord(msgspec.Struct, kw_only=True):
    """A conversation: what is small of it, and where its items are, in their order."""

    id: str
    created_at: int
    metadata: dict[str, str] = {}
    batches: list[ItemBatch] = []

    @property
    def size(self) -> int:
        """The bytes of all batches."""
        return sum(batch.size for batch in self.batches)

    @property
    def item_ids(self) -> list[str]:
        return [name for batch in self.batches for name in batch.items]


class NewConversation(msgspec.Struct, kw_only=True):
    """A conversation to be created."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class AddedItems(msgspec.Struct, kw_only=True):
    """Items to be added to a conversation."""

    items: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_NEW_ITEMS)]


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation, as routes answer it."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, kw_only=True):
    """The answer to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
