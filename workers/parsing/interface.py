"""Defines the interface of the parsers for tool calls and reasoning, built-in ones and those of engines.

A worker has a `ParserSet`, a request a `ParsePlan`, a choice an `AnswerParser`. An answer parser is always fed one token at a
time, so its parts are a pure function of the token ids: they do not depend on how an engine cut its output into steps, and a
resumed answer, whose ids are replayed without output, goes on in exactly the same state.
"""

from __future__ import annotations

import re
from base64 import b32encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from headrace.broker.messages.frames import FinishReason, Part
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers.errors import RequestInvalid


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The names of the parsers that an engine provides."""

    tools: tuple[str, ...]
    reasoning: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseRequirements:
    """Options that the engine must run with so that its answer can be parsed.

    `reasoning_ended` and `reasoning_kwargs` are inputs of an engine's own reasoning parser, so that structured output begins
    after the reasoning; None: the engine detects the end of the reasoning.
    """

    guided: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    reasoning_ended: bool | None = None
    reasoning_kwargs: Mapping[str, Any] | None = None


class AnswerParser(Protocol):
    """Parses an answer into parts. Any exception that it raises means that the answer cannot be parsed."""

    def push(self, token_id: int, text: str) -> list[Part]:
        """Return the parts that are certain with this token and its text; none before the end if whole parts are requested."""

    def finish(self, token_id: int | None, text: str) -> list[Part]:
        """Add the last token, if it was not pushed yet, and the text that was left. Returns the rest of the answer."""

    @property
    def called(self) -> bool:
        """Return whether a tool call has been returned."""

    def reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens so far, as far as the parser can tell."""


class ParsePlan(Protocol):
    @property
    def requirements(self) -> ParseRequirements: ...

    def parser(self, request_id: str, choice: int) -> AnswerParser:
        """Create a parser for a choice. The ids of its tool calls depend only on the arguments and the answer."""


class ParserSet(Protocol):
    """The parsers of a worker. `tool` and `reasoning` are the names of the parsers in use, None = none."""

    @property
    def tool(self) -> str | None: ...

    @property
    def reasoning(self) -> str | None: ...

    def plan(self, parsing: Parsing, generation: Generation, prompt_ids: Sequence[int]) -> ParsePlan:
        """Plan the parsing of a request's answers. Raises RequestInvalid."""


def named_function(parsing: Parsing) -> str | None:
    """Return the name of the function that must be called, or None if none is named."""
    if isinstance(parsing.choice, str):
        return None
    function = parsing.choice.get("function")
    return str(function["name"]) if isinstance(function, Mapping) and "name" in function else None


def finish_reason(parsing: Parsing, reason: FinishReason, *, called: bool) -> FinishReason:
    """Return the finish reason as vLLM's server does: "tool_calls" for calls that the model chose, never for a named function.

    A streamed answer must also have ended by itself. For a whole answer `auto` requires only a call, and `required` not even
    that.
    """
    if not isinstance(parsing.choice, str) or parsing.choice == "none":
        return reason
    if not parsing.whole:
        return "tool_calls" if called and reason == "stop" else reason
    if parsing.choice == "required":
        return "tool_calls" if reason == "stop" else reason
    return "tool_calls" if called else reason


# Builds the JSON schema of an answer that must call a tool, for workers without a parser of the model's own call format.

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def forced_schema(parsing: Parsing) -> dict[str, Any] | None:
    """Return the schema of the named function's arguments, or for `required` of a list of calls; None if no call is forced.

    Raises RequestInvalid for a function name that no tool has.
    """
    name = named_function(parsing)
    functions = [tool["function"] for tool in parsing.tools if tool.get("type") == "function"]
    if name is not None:
        for function in functions:
            if function["name"] == name:
                return dict(function.get("parameters") or _NOTHING)
        raise RequestInvalid(f"tool_choice names the function {name!r}, which is not among the tools", param="tool_choice")
    if parsing.choice != "required":
        return None
    if not functions:
        raise RequestInvalid("tool_choice is required, and there are no functions among the tools", param="tools")
    return _list_of_calls(functions, several=parsing.parallel)


def _list_of_calls(functions: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function.get("parameters") or _NOTHING)
        for name, definition in (parameters.pop("$defs", None) or {}).items():  # References are paths from the root.
            if definitions.setdefault(name, definition) != definition:
                raise RequestInvalid(f"two tools define {name!r} differently", param="tools")
        calls.append(
            {
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if not several:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


_ENGINE_MADE = re.compile(r"(chatcmpl-tool-|call_(\d+_)?)[0-9a-f-]{16,}")
_NINE = re.compile(r"[A-Za-z0-9]{9}")


def call_id(request_id: str, choice: int, index: int, *, length: int = 24) -> str:
    """Return `length` lower case letters and digits, a hash of the arguments."""
    digest = blake2b(f"{request_id}\0{choice}\0{index}".encode(), digest_size=(5 * length + 7) // 8).digest()
    return b32encode(digest).decode().lower()[:length]


def stable_call_id(given: str | None, request_id: str, choice: int, index: int) -> str:
    """Return the id of a call for which its parser gave the id `given`.

    Meaningful ids (`functions.get_weather:0`) stay; random ones are replaced. Some templates require the nine characters that
    their parser generates.
    """
    if given and _NINE.fullmatch(given):
        return call_id(request_id, choice, index, length=9)
    if given and not _ENGINE_MADE.fullmatch(given):
        return given
    return f"call_{call_id(request_id, choice, index)}"
