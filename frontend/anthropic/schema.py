"""The requests and answers of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Names and ranges are Anthropic's, plus what vLLM's server added.  Blocks and tools stay mappings: what they may be depends on
their type.  `cache_control` is taken anywhere and means nothing here: every prefix is cached.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.schema.common import Positive

Block = dict[str, Any]
Effort = Literal["low", "medium", "high", "xhigh", "max"]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]

LEAST_BUDGET = 1024


class MessageIn(msgspec.Struct, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolUseChoice(msgspec.Struct, kw_only=True):
    """`any`: some tool must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model is to think first. `display` is taken and ignored: what was thought is always given out."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=LEAST_BUDGET, le=2**31 - 1)] | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A schema that the text must conform to."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`effort` goes to the chat template."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class RequestMetadata(msgspec.Struct, kw_only=True):
    """`user_id`: requests of one user go to one worker where that costs nothing. Claude Code names its session in it."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """What becomes the prompt: all that counting needs."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    messages: Annotated[list[MessageIn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    container: Any = None


class MessagesRequest(Conversation, kw_only=True):
    """A message to be answered."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # both are the usual one; `priority` orders
    # vLLM's additions
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    vllm_xargs: dict[str, Any] | None = None
    # Headrace's
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    session_id: Annotated[str, Meta(max_length=512)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CountRequest(Conversation, kw_only=True):
    """A prompt to be counted."""


class TokenCount(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """What the model said."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """What it thought. Nobody checks `signature`; it is there because clients send it back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A tool it wants used."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingCount(msgspec.Struct, kw_only=True):
    """Of the answer's tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were not found in a cache; Anthropic counts that way."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingCount | None = None


class MessageAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class AnthropicFault(msgspec.Struct, kw_only=True):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """Every error of the Messages API has this shape."""

    type: Literal["error"] = "error"
    error: AnthropicFault
