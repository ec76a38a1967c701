"""The bodies of answers that are not streamed, and the shape of everything for `/openapi.json`.

Streamed events are written from prepared bytes (`sse.py`), not from these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

UnsetType = msgspec.UnsetType
UNSET = msgspec.UNSET


class CachedTokens(msgspec.Struct):
    """How much of the prompt was found in a KV cache."""

    cached_tokens: int = 0


class CompletionTokens(msgspec.Struct):
    """How much of the answer was reasoning, as far as the model's parser can tell."""

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
    """Log probabilities of a chat choice. Nothing is ever said as a refusal."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completions choice; one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt: nothing came before it
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """A token at a place of the prompt; `rank` 1 is the likeliest there, null where nobody counted."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, per prompt token; null for the first."""


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON text; a model may have got it wrong, or have been cut off."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool the model wants called."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the model said. Reasoning has two names: vLLM's server calls it `reasoning`, most clients `reasoning_content`."""

    role: str
    content: str | None
    refusal: None = None
    audio: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. `stop_reason` is the stop string or token that ended it, if one did."""

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
    """One continuation. `stop_reason` is the stop string or token that ended it, if one did."""

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
    """What was wrong, for people (`message`) and programs (`code`, `param`)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every error has this shape."""

    error: ErrorDetail
