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


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all prompts and all choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens


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
    """Log probabilities of a chat choice."""

    content: list[ContentLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completions choice; one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class ChatMessage(msgspec.Struct):
    """What the model said."""

    role: str
    content: str
    refusal: None = None


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
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation. `stop_reason` is the stop string or token that ended it, if one did."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
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
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    root: str


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
