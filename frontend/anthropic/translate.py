"""Translates a request of the Messages API into a chat request. Sans-io."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.frontend.anthropic.conversation import continues, messages_of
from headrace.frontend.anthropic.schema import MessagesRequest, PromptFields, ToolUseChoice
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.tools import KNOWN_TOOLS, hosted_type
from headrace.frontend.http.field_checks import mapping_at, missing, unsupported
from headrace.frontend.schema.chat import ChatRequest, Function, FunctionName, Tool, ToolChoice
from headrace.frontend.schema.common import JsonSchema, ResponseFormat

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: PromptFields, *, strip_billing: bool, merge_system: bool = False) -> ChatRequest:
    """Return the chat request. With `merge_system` all system messages become the first one, as some templates require.

    Raises BadRequest with the path of the field.
    """
    _refuse(request)
    tools = _tools(request.tools)
    chat = ChatRequest(
        model=request.model,
        messages=messages_of(request, strip_billing=strip_billing, merge_system=merge_system),
        tools=tools or None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    _choose(request.tool_choice, tools, chat)
    _think(request, chat)
    if isinstance(request, MessagesRequest):
        _sampling(request, chat)
    if continues(chat.messages):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    return chat


def has_inline_system(request: PromptFields) -> bool:
    """Return True if the messages include system messages."""
    return any(message.role == "system" for message in request.messages)


def _refuse(request: PromptFields) -> None:
    if request.mcp_servers:
        raise unsupported("mcp_servers")
    if request.container is not None:
        raise unsupported("container")


def _tools(given: Iterable[Mapping[str, Any]] | None) -> list[Tool]:
    tools = []
    for i, tool in enumerate(given or ()):
        where = f"tools[{i}]"
        kind = tool.get("type")
        if isinstance(kind, str) and hosted_type(kind) is not None:
            tools.append(Tool(type=kind))
            continue
        if kind not in (None, "custom"):
            raise unsupported(f"{where}.type", f"{str(kind)[:100]!r} {KNOWN_TOOLS}")
        schema = dict(mapping_at(tool.get("input_schema"), f"{where}.input_schema"))
        schema.setdefault("type", "object")
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
        try:
            tools.append(Tool(function=msgspec.convert({**function, "strict": tool.get("strict")}, Function)))
        except msgspec.ValidationError as error:
            raise BadRequest(f"invalid value for {where}: {error}", param=where) from None
    return tools


def _choose(choice: ToolUseChoice | None, tools: list[Tool], chat: ChatRequest) -> None:
    if choice is None:
        return
    if choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if not tools:
        if choice.type in ("any", "tool"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return
    if choice.type != "tool":
        chat.tool_choice = _CHOICES[choice.type]
        return
    if not choice.name:
        param = "tool_choice.name"
        raise missing(param)
    chat.tool_choice = ToolChoice(function=FunctionName(name=choice.name))


def _think(request: PromptFields, chat: ChatRequest) -> None:
    """Set the options of reasoning. Templates have two names for the switch, and may ignore both."""
    config = request.output_config
    if config is not None and config.effort is not None:
        chat.reasoning_effort = config.effort
    shape = (config.format if config is not None else None) or request.output_format
    if shape is not None:
        if shape.schema is None:
            param = "output_config.format.schema"
            raise missing(param)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=shape.schema))
    thinking = request.thinking
    if thinking is None:
        return
    on = thinking.type != "disabled"
    chat.chat_template_kwargs = {"enable_thinking": on, "thinking": on, **(request.chat_template_kwargs or {})}
    if thinking.type == "enabled":
        param = "thinking.budget_tokens"
        if thinking.budget_tokens is None:
            raise missing(param)
        if isinstance(request, MessagesRequest) and thinking.budget_tokens >= request.max_tokens:
            message = f"{param} ({thinking.budget_tokens}) must be less than max_tokens ({request.max_tokens})"
            raise BadRequest(message, param=param)
        chat.thinking_token_budget = thinking.budget_tokens


def _sampling(request: MessagesRequest, chat: ChatRequest) -> None:
    chat.stream = request.stream
    chat.stop = request.stop_sequences or None
    chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    chat.cache_salt, chat.vllm_xargs = request.cache_salt, request.vllm_xargs
    chat.priority, chat.timeout = request.priority, request.timeout
    chat.nvext = request.nvext
    user = request.metadata.user_id if request.metadata else None
    chat.session_id = request.session_id or user or None
