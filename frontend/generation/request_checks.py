"""Checks a generation request as far as the request and the settings suffice, before a model or a tokenizer is involved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from headrace.broker.models.cards import ModelCard
from headrace.frontend.chat_schema import ChatRequest, GenerationRequest, NamedTool, Tool, ToolChoice
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.content_blocks import as_function
from headrace.frontend.http.bodies import missing, unsupported
from headrace.frontend.settings import FrontendSettings

REFUSED = {
    "use_beam_search": "is not supported here: ask for n choices and take the best",
    "watermarking": "is not supported here",
    "logprob_token_ids": "is not supported here: use top_logprobs",
    "repetition_detection": "is not supported here",
    "kv_transfer_params": "cannot be sent with a request: workers hand over by themselves",
    "ec_transfer_params": "cannot be sent with a request: workers hand over by themselves",
    "mm_processor_kwargs": "cannot be sent with a request: it changes what a request costs",
    "media_io_kwargs": "cannot be sent with a request: it changes what a request costs",
}
"""Parameters of vLLM's server that are refused, and why."""

_refused_of = attrgetter(*REFUSED)


def refuse_unsupported(request: GenerationRequest) -> None:
    """Refuse parameters that would otherwise be ignored silently, and combinations that cannot be. Raises BadRequest."""
    if any(given := _refused_of(request)):
        param = next(param for param, value in zip(REFUSED, given, strict=True) if value)
        raise unsupported(param, REFUSED[param])
    if request.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "cannot be turned off here")
    if request.truncation_side == "right":
        raise unsupported("truncation_side", '"right" is not supported here: the end of a prompt is kept')
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")


def check_choices(n: int, prompts: int, settings: FrontendSettings) -> None:
    """Refuse a request for more choices than one request may have. Raises BadRequest."""
    if n * prompts > settings.max_choices:
        param = "n" if n > 1 else "prompt"
        raise BadRequest(f"at most {settings.max_choices} choices in one request, this one asks for {n * prompts}", param=param)


Choice = str | dict[str, Any]

NOT_RUN = "is not supported here: no tool runs on the server; function and custom only"
"""Why a tool is refused that the API's own servers run, or whose calls only their models know."""

KNOWN_TOOLS = "is not known here: function, custom, and the types that OpenAI's and Anthropic's servers have"

_HOSTED = frozenset(
    {
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "computer"),
        *("computer_use", "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search"),
        "programmatic_tool_calling",
        # Anthropic's
        *("web_fetch", "code_execution", "bash", "text_editor", "memory", "mcp_toolset", "advisor"),
        *("tool_search_tool_regex", "tool_search_tool_bm25"),
    }
)
_VERSION = re.compile(r"_20\d\d_?\d\d_?\d\d\Z")

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a request with all keys that templates print. `choice` is auto, none, required or a named tool.

    `freeform` has the names of those whose input is plain text, `not_offered` the types of those that the model is not shown.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: Choice = "none"
    freeform: frozenset[str] = frozenset()
    not_offered: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        return bool(self.tools) and self.choice != "none"


NO_TOOLS = Toolbox()


def hosted_type(kind: str) -> str | None:
    """Return a type of tools that the API's own servers run, without the date of its version; None for any other type."""
    family = _VERSION.sub("", kind)
    return family if family in _HOSTED else None


def toolbox_of(request: ChatRequest, card: ModelCard, *, refuse_hosted: bool = False) -> Toolbox:
    """Check the tools of a request. Raises BadRequest with the path of the field."""
    tools, choice = request.tools, request.tool_choice
    if tools is None:
        if choice is not None and choice != "none":
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return NO_TOOLS
    if not tools:
        raise BadRequest("tools must not be an empty list; leave it out instead", param="tools")
    hosted = {i: family for i, tool in enumerate(tools) if (family := hosted_type(tool.type)) is not None}
    if refuse_hosted:
        for i in hosted:
            raise unsupported(f"tools[{i}].type", f"{tools[i].type!r} {NOT_RUN}")
    run = [tool for i, tool in enumerate(tools) if i not in hosted]
    given = [_tool(tool, i) for i, tool in enumerate(tools) if i not in hosted]
    names = {described["function"]["name"]: tool.type for described, tool in zip(given, run, strict=True)}
    freeform = frozenset(name for name, kind in names.items() if kind == "custom")
    if freeform and len(names) < len(given):
        raise BadRequest("tools: two tools have the same name, and one of them is of the type custom", param="tools")
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
    box = replace(box, freeform=freeform, not_offered=tuple(sorted(set(hosted.values()))))
    if not box.tools:
        if box.choice == "required":
            raise BadRequest("tool_choice needs a tool that is offered to the model", param="tool_choice")
        return replace(box, choice="none")
    _check_grammars(tools, box)
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
    if tool.type == "custom":
        if tool.custom is None:
            raise missing(f"tools[{index}].custom")
        shape = tool.custom.format
        if shape is not None and shape.type == "grammar" and shape.grammar is None:
            raise missing(f"tools[{index}].custom.format.grammar")
        return {"type": "function", "function": as_function(tool.custom)}
    if tool.type != "function":
        raise unsupported(f"tools[{index}].type", f"{tool.type[:100]!r} {KNOWN_TOOLS}")
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


def _check_grammars(tools: Sequence[Tool], box: Toolbox) -> None:
    """Refuse a lark grammar for a call that is forced: structured output has to promise the whole call. Raises BadRequest."""
    if not box.wanted or box.choice == "auto":
        return
    named = box.choice["function"]["name"] if isinstance(box.choice, dict) else None
    callable_ = {tool["function"]["name"] for tool in box.tools}
    for i, tool in enumerate(tools):
        grammar = tool.custom.format.grammar if tool.custom is not None and tool.custom.format is not None else None
        if tool.custom is None or grammar is None or grammar.syntax != "lark":
            continue
        if tool.custom.name == named or (named is None and tool.custom.name in callable_):
            why = "lark cannot be enforced here when tool_choice forces the call; with auto the model is shown the grammar"
            raise unsupported(f"tools[{i}].format", why)


def _named(choice: ToolChoice | NamedTool, names: Mapping[str, str], param: str) -> str:
    if choice.type not in ("function", "custom"):
        raise unsupported(f"{param}.type", f"{choice.type[:100]!r} is not supported here: function and custom only")
    chosen = choice.function if choice.type == "function" else choice.custom
    if chosen is None:
        raise missing(f"{param}.{choice.type}")
    if names.get(chosen.name) != choice.type:
        where = f"{param}.{choice.type}.name"
        known = ", ".join(sorted(name for name, kind in names.items() if kind == choice.type)) or "there are none"
        message = f"{where} {chosen.name[:100]!r} is none of the tools of the type {choice.type}: {known[:500]}"
        raise BadRequest(message, param=where)
    return chosen.name


def _allowed(tools: list[dict[str, Any]], names: Mapping[str, str], choice: ToolChoice) -> Toolbox:
    allowed = choice.allowed_tools
    if allowed is None:
        raise missing("tool_choice.allowed_tools")
    kept = {
        _named(tool, names, f"tool_choice.allowed_tools.tools[{i}]")
        for i, tool in enumerate(allowed.tools)
        if hosted_type(tool.type) is None
    }
    return Toolbox(tools=[tool for tool in tools if tool["function"]["name"] in kept], choice=allowed.mode)


def calls_in(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)
