"""Defines the interface of the parsers for tool calls and reasoning, built-in ones and those of engines.

A worker has a `ParserSet`, a request a `ParsePlan`, a choice an `AnswerParser`. An answer parser is always fed one token at a
time, so its parts are a pure function of the token ids: they do not depend on how an engine cut its output into steps, and a
resumed answer, whose ids are replayed without output, goes on in exactly the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.broker.messages import FinishReason, Generation, Parsing, Part


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
    """The plan for parsing the answers to a request."""

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
