"""The request of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Required, TypedDict

from msgspec import Meta

from frontend.schema.common import MAX_LOGPROBS, GenerationRequest, Positive


class ContentPart(TypedDict, total=False):
    """A part of a message's content. Only text is taken today; the type decides which other key is read."""

    type: Required[str]
    text: str


class Message(TypedDict, total=False):
    """One message, handed to the chat template as the mapping it is."""

    role: Required[Annotated[str, Meta(min_length=1, max_length=64)]]
    content: str | list[ContentPart] | None
    name: str
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None
    reasoning_content: str | None


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation to be answered."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
