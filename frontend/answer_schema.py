"""The bodies of answers that are not streamed, also as schemas for `/openapi.json`.

Streamed events are written from prepared bytes (`headrace.frontend.generation.sse`), not from these structs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.chat_schema import MetadataKey, MetadataValue

UnsetType = msgspec.UnsetType
UNSET = msgspec.UNSET


class CachedTokens(msgspec.Struct):
    """The number of prompt tokens found in a KV cache."""

    cached_tokens: int = 0


class CompletionTokens(msgspec.Struct):
    """The number of reasoning tokens in the answer, according to the model's parser."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all prompts and all choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """An alternative to the chosen token."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    """A chosen token with its alternatives, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat choice. `refusal` is never used."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completions choice; one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """A token at a position of the prompt. `rank` 1 is the likeliest there; null = unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, per prompt token; null for the first."""


class CalledFunction(msgspec.Struct):
    """A called function. `arguments` is JSON text of the model, which may be invalid or truncated."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, kw_only=True, tag="function"):
    """A tool call of the model."""

    id: str
    function: CalledFunction


class CalledTool(msgspec.Struct):
    """A called freeform tool. `input` is plain text of the model."""

    name: str
    input: str


class MessageCustomCall(msgspec.Struct, kw_only=True, tag="custom"):
    """A call of a freeform tool by the model."""

    id: str
    custom: CalledTool


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of the model. Reasoning has two names: vLLM's server uses `reasoning`, most clients `reasoning_content`."""

    role: str
    content: str | None
    refusal: None = None
    audio: None = None
    tool_calls: list[MessageToolCall | MessageCustomCall] | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of a chat. `stop_reason` is the stop string or token that ended it, if any."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion. `stop_reason` is the stop string or token that ended it, if any."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelEntry(msgspec.Struct, kw_only=True):
    """A served model, or an adapter of the model `parent`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


class ErrorDetail(msgspec.Struct):
    """The details of an error, for people (`message`) and programs (`code`, `param`)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The shape of every error."""

    error: ErrorDetail


Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]


class Page(msgspec.Struct, kw_only=True):
    """A page of stored objects: those from `first_id` to `last_id`."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """The life of a file, from its creation on."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class ChatRecord(msgspec.Struct, kw_only=True):
    """The fields of a stored completion that lists and filters need."""

    id: str
    created: int
    model: str
    metadata: dict[str, str] = {}


class MetadataChange(msgspec.Struct, kw_only=True):
    """New metadata for a stored object; null removes it."""

    metadata: Metadata | None


class StoredChat(msgspec.Struct, kw_only=True):
    """A stored chat completion, as it was answered, with its metadata."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    choices: list[dict[str, Any]]
    usage: Usage
    metadata: dict[str, str] = {}
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class ChatList(Page, kw_only=True):
    """A page of stored completions."""

    data: list[StoredChat]


class DeletedChat(msgspec.Struct, kw_only=True):
    """The answer to the deletion of a stored completion."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


class StoredMessage(msgspec.Struct, kw_only=True):
    """A message that a stored completion answers. Content in parts is in `content_parts`."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None
    name: str | None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class ChatMessageList(Page, kw_only=True):
    """A page of the messages of a stored completion."""

    data: list[StoredMessage]
