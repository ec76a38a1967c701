"""Checks the tools of a chat request, and brings them into the form for the chat template and the worker's parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.broker.models.cards import ModelCard
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import missing, unsupported
from headrace.frontend.schema.chat import ChatRequest, NamedTool, Tool, ToolChoice

Choice = str | dict[str, Any]

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a request with all keys that templates print. `choice` is auto, none, required or a named tool."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: Choice = "none"

    @property
    def wanted(self) -> bool:
        """Return True if the answer may contain tool calls."""
        return bool(self.tools) and self.choice != "none"


NO_TOOLS = Toolbox()


def toolbox_of(request: ChatRequest, card: ModelCard) -> Toolbox:
    """Check the tools of a request. Raises BadRequest with the path of the field."""
    tools, choice = request.tools, request.tool_choice
    if tools is None:
        if choice is not None and choice != "none":
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return NO_TOOLS
    if not tools:
        raise BadRequest("tools must not be an empty list; leave it out instead", param="tools")
    given = [_tool(tool, i) for i, tool in enumerate(tools)]
    names = {tool["function"]["name"] for tool in given}
    if choice is None:
        box = Toolbox(tools=given, choice="auto")
    elif isinstance(choice, str):
        if choice not in _CHOICES:
            raise BadRequest(
                f"tool_choice must be none, auto, required or a named tool, got {choice[:100]!r}", param="tool_choice"
            )
        box = Toolbox(tools=given, choice=choice)
    elif choice.type == "allowed_tools":
        box = _allowed(given, names, choice)
    else:
        name = _named(choice, names, "tool_choice")
        box = Toolbox(tools=given, choice={"type": "function", "function": {"name": name}})
    if box.choice == "auto" and card.tool_parser is None:
        raise BadRequest(
            f"{card.model!r} is served without a tool call parser, so tool_choice cannot be auto: use required, a named tool "
            "or none, or set the worker's --tool-parser",
            param="tool_choice",
            code="no_tool_parser",
        )
    return box


def _tool(tool: Tool, index: int) -> dict[str, Any]:
    """Return a tool with the keys of vLLM's server, in its order, because some templates print tools as they are."""
    if tool.type != "function":
        raise unsupported(f"tools[{index}].type", f"{tool.type[:100]!r} is not supported here: functions only")
    function = tool.function
    if function is None:
        raise missing(f"tools[{index}].function")
    described: dict[str, Any] = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    if function.strict is not None:
        described["strict"] = function.strict
    return {"type": "function", "function": described}


def _named(choice: ToolChoice | NamedTool, names: set[str], param: str) -> str:
    if choice.type != "function":
        raise unsupported(f"{param}.type", f"{choice.type[:100]!r} is not supported here: functions only")
    if choice.function is None:
        raise missing(f"{param}.function")
    name = choice.function.name
    if name not in names:
        where = f"{param}.function.name"
        raise BadRequest(f"{where} {name[:100]!r} is none of the tools: {', '.join(sorted(names))[:500]}", param=where)
    return name


def _allowed(tools: list[dict[str, Any]], names: set[str], choice: ToolChoice) -> Toolbox:
    """Return only the tools that the model may use."""
    allowed = choice.allowed_tools
    if allowed is None:
        raise missing("tool_choice.allowed_tools")
    kept = {_named(tool, names, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(allowed.tools)}
    return Toolbox(tools=[tool for tool in tools if tool["function"]["name"] in kept], choice=allowed.mode)


def calls_in(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the tool calls in the conversation so far."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)
