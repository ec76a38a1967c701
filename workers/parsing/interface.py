"""What the text pipeline knows of the parsers for tool calls and reasoning, whoever brings them.

Three things, from long-lived to short-lived: a `ParserSet` per worker, a `ParsePlan` per request, an `AnswerParser` per choice.
An answer parser is always fed one token at a time, so what it says is a pure function of the token ids: how an engine cut its
output into steps cannot change it, and a resumed answer, whose ids are replayed in silence, goes on exactly where it stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.broker.messages import FinishReason, Generation, Parsing, Part


@dataclass(frozen=True, slots=True)
class Known:
    """The names of the parsers that an engine brings."""

    tools: tuple[str, ...]
    reasoning: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the engine is asked for, so that its answer can be taken apart.

    `reasoning_ended` and `reasoning_kwargs`: what an engine's own reasoning parser must know so that structured output begins
    after the reasoning; None = it finds out by itself.
    """

    guided: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    reasoning_ended: bool | None = None
    reasoning_kwargs: Mapping[str, Any] | None = None


class AnswerParser(Protocol):
    """Takes one answer apart. Anything it raises means that the answer cannot be taken apart."""

    def push(self, token_id: int, text: str) -> list[Part]:
        """What became certain with this token and the text it released; nothing before the end if that was asked for."""

    def finish(self, token_id: int | None, text: str) -> list[Part]:
        """The last token, if it was not pushed yet, the text that was left, and with them the rest of the answer."""

    @property
    def called(self) -> bool:
        """A tool call has been handed out."""

    def reasoning_tokens(self) -> int:
        """Of the tokens so far, as far as it can tell."""


class ParsePlan(Protocol):
    """How the answers to one request are taken apart."""

    @property
    def asked(self) -> Asked: ...

    def parser(self, request_id: str, choice: int) -> AnswerParser:
        """A new one. The ids of its tool calls depend on nothing but these two and the answer."""


class ParserSet(Protocol):
    """The parsers of one worker. `tool` and `reasoning` are the names of those in use, None = none."""

    @property
    def tool(self) -> str | None: ...

    @property
    def reasoning(self) -> str | None: ...

    def plan(self, parsing: Parsing, generation: Generation, prompt_ids: Sequence[int]) -> ParsePlan:
        """Raises RequestInvalid."""


def named_function(parsing: Parsing) -> str | None:
    """The function that must be called, if one is named."""
    if isinstance(parsing.choice, str):
        return None
    function = parsing.choice.get("function")
    return str(function["name"]) if isinstance(function, Mapping) and "name" in function else None


def finish_reason(parsing: Parsing, reason: FinishReason, *, called: bool) -> FinishReason:
    """Why the answer ended, as vLLM's server has it: "tool_calls" for calls of its own choice, never for a named function.

    A streamed answer must also have ended by itself; of a whole one `auto` asks only for a call, and `required` for none.
    """
    if not isinstance(parsing.choice, str) or parsing.choice == "none":
        return reason
    if not parsing.whole:
        return "tool_calls" if called and reason == "stop" else reason
    if parsing.choice == "required":
        return "tool_calls" if reason == "stop" else reason
    return "tool_calls" if called else reason
