"""The request of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypedDict

import msgspec
from msgspec import Meta

from headrace.frontend.schema.common import MAX_LOGPROBS, GenerationRequest, NonEmpty, Positive

MAX_GRAMMAR = 256 * 1024  # characters; a grammar becomes part of the prompt

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionCall(TypedDict, total=False):
    """A function called by an assistant. `arguments` is JSON text, as in answers; an object is accepted as well."""

    name: Required[NonEmpty]
    arguments: str | dict[str, Any] | None


class CustomCall(TypedDict, total=False):
    """A freeform tool called by an assistant, with its input as plain text."""

    name: Required[NonEmpty]
    input: str


class ToolCall(TypedDict, total=False):
    """A tool call in a message of the assistant: of a function, or of a freeform tool."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionCall
    custom: CustomCall


class Message(TypedDict, total=False):
    """A message of a conversation. Fields that its role does not use are ignored."""

    role: Required[Annotated[str, Meta(min_length=1, max_length=64)]]
    content: str | list[dict[str, Any]] | None
    name: str | None
    tool_calls: list[ToolCall] | None
    tool_call_id: str | None
    reasoning_content: str | None
    reasoning: str | None


class Function(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(msgspec.Struct, kw_only=True):
    """A grammar for the input of a freeform tool."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)]


class InputFormat(msgspec.Struct, kw_only=True):
    """The format of a freeform tool's input. `grammar` is needed by the type of that name."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A freeform tool: the model calls it with plain text."""

    name: NonEmpty
    description: str | None = None
    format: InputFormat | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool. Types other than `function` and `custom` are refused by name."""

    type: str = "function"
    function: Function | None = None
    custom: CustomTool | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """The name of a tool."""

    name: NonEmpty


class NamedTool(msgspec.Struct, kw_only=True):
    """A tool by its name."""

    type: str = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called. With `mode` required, one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class ToolChoice(msgspec.Struct, kw_only=True):
    """A tool by its name, or the allowed tools."""

    type: str = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation to be answered."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_prompt_text: bool | None = None
