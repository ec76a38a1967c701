"""The requests and answers of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Names and ranges are Anthropic's, plus the additions of vLLM's server. Blocks and tools stay mappings, because their fields
depend on their type. `cache_control` is ignored everywhere: every prefix is cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.answer_schema import UNSET, UnsetType
from headrace.frontend.chat_schema import Nvext, Positive
from headrace.frontend.errors import ContextTooLong, FrontendError

Block = dict[str, Any]
Effort = Literal["low", "medium", "high", "xhigh", "max"]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]

LEAST_BUDGET = 1024

HINTS = (  # without effect
    *("cache_control", "diagnostics", "speed"),
    *("inference_geo", "user_profile_id", "workspace_id"),
)


class MessageIn(msgspec.Struct, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolUseChoice(msgspec.Struct, kw_only=True):
    """The choice of tools. `any` means that the model must use a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """The switch for reasoning. `display` is ignored: reasoning is always returned."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=LEAST_BUDGET, le=2**31 - 1)] | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The schema that the text must conform to."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """Options of the answer. `effort` goes to the chat template."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class RequestMetadata(msgspec.Struct, kw_only=True):
    """Metadata of a request. Requests of one `user_id` have soft session affinity. Claude Code puts its session into it."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class TokenAmount(msgspec.Struct, frozen=True, kw_only=True, tag="input_tokens"):
    """A number of tokens of the prompt."""

    value: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ToolUseAmount(msgspec.Struct, frozen=True, kw_only=True, tag="tool_uses"):
    """A number of tool uses."""

    value: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ThinkingTurns(msgspec.Struct, frozen=True, kw_only=True, tag="thinking_turns"):
    """The last turns of the assistant that have thinking."""

    value: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class AllTurns(msgspec.Struct, kw_only=True, tag="all"):
    """All turns."""


class ClearThinking(msgspec.Struct, kw_only=True, tag="clear_thinking_20251015", forbid_unknown_fields=True):
    """Removes the thinking of earlier turns."""

    keep: Literal["all"] | AllTurns | ThinkingTurns = ThinkingTurns(value=1)


class ClearToolUses(msgspec.Struct, kw_only=True, tag="clear_tool_uses_20250919", forbid_unknown_fields=True):
    """Replaces results of earlier tool uses by a note, once the prompt is longer than `trigger`."""

    trigger: TokenAmount | ToolUseAmount = TokenAmount(value=100_000)
    keep: ToolUseAmount = ToolUseAmount(value=3)
    clear_at_least: TokenAmount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Edits of the conversation before it becomes the prompt."""

    edits: list[ClearThinking | ClearToolUses] | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields that become the prompt, which are all that counting needs."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # None = the only one that is served
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
    context_management: ContextManagement | None = None


class MessagesRequest(PromptFields, kw_only=True):
    """A message to be answered."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # without effect; `priority` orders requests
    # vLLM's additions
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    vllm_xargs: dict[str, Any] | None = None
    # Headrace's
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    session_id: Annotated[str, Meta(max_length=512)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    nvext: Nvext | None = None


class CountRequest(PromptFields, kw_only=True):
    """A prompt to be counted."""


class OriginalTokens(msgspec.Struct, kw_only=True):
    """The tokens of a prompt before the edits."""

    original_input_tokens: int


class TokenCount(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int
    context_management: OriginalTokens | None = None


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Text of the model."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning of the model. `signature` is never checked; it exists because clients send it back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A tool call by the model."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingCount(msgspec.Struct, kw_only=True):
    """Counts among the tokens of the answer."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """The token usage of a message. As in Anthropic's API, `input_tokens` leaves out cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingCount | None = None


class ThinkingCleared(msgspec.Struct, kw_only=True, tag="clear_thinking_20251015"):
    """Thinking that was left out of the prompt."""

    cleared_thinking_turns: int
    cleared_input_tokens: int


class ToolUsesCleared(msgspec.Struct, kw_only=True, tag="clear_tool_uses_20250919"):
    """Results of tools that were left out of the prompt."""

    cleared_tool_uses: int
    cleared_input_tokens: int


class AppliedEdits(msgspec.Struct, kw_only=True):
    """The edits that changed the prompt."""

    applied_edits: list[ThinkingCleared | ToolUsesCleared]


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
    context_management: AppliedEdits | UnsetType = UNSET


class AnthropicFault(msgspec.Struct, kw_only=True):
    """The type and the message of an error."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """The shape of every error of the Messages API."""

    type: Literal["error"] = "error"
    error: AnthropicFault


OVERLOADED = 529
VERSION_HEADER = b"anthropic-version"  # in every request of Anthropic's clients

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicForm:
    """The error form of the Messages API. Status 503 of OpenAI's API is 529 here."""

    def __call__(self, error: FrontendError, /) -> bytes:
        return msgspec.json.encode(self._answer(error))

    def status(self, error: FrontendError, /) -> int:
        return OVERLOADED if error.status == 503 else error.status

    def event(self, error: FrontendError) -> bytes:
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(self._answer(error))

    def _answer(self, error: FrontendError) -> AnthropicError:
        status = self.status(error)
        kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return AnthropicError(error=AnthropicFault(type=kind, message=_words(error)))


def speaks_anthropic(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == VERSION_HEADER for name, _ in headers)


def _words(error: FrontendError) -> str:
    if isinstance(error, ContextTooLong) and error.tokens is not None:
        # clients that shorten long sessions look for this wording
        return f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    message = str(error)
    # Anthropic's errors have no field for the parameter, so the message names it
    return message if error.param is None or error.param in message else f"{error.param}: {message}"
