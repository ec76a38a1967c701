"""Defines the interface of the parsers for tool calls and reasoning, built-in ones and those of engines.

A worker has a `ParserSet`, a request a `ParsePlan`, a choice an `AnswerParser`. An answer parser is always fed one token at a
time, so its parts are a pure function of the token ids: they do not depend on how an engine cut its output into steps, and a
resumed answer, whose ids are replayed without output, goes on in exactly the same state.
"""

from __future__ import annotations

import re
from base64 import b32encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

import msgspec
import structlog

from headrace.broker.jobs import Call, OutputParts
from headrace.broker.messages.frames import FinishReason, Part, Text
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers import metrics
from headrace.workers.detokenize import TextPipeline
from headrace.workers.errors import AnswerUnreadable, RequestInvalid

log = structlog.get_logger()


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


PROMPT_END = 16
"""Last tokens of the prompt that are searched for an opening mark of reasoning."""


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


def check_chosen_tools(parsing: Parsing, tool: str | None) -> None:
    """Raise RequestInvalid if the model is to choose among tools, and there is no parser for its calls."""
    if parsing.tools and parsing.choice == "auto" and tool is None:
        raise RequestInvalid("this worker has no tool parser, so the model cannot choose its tools", param="tool_choice")


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


# From token ids to parts: text, the cut at the stop string, and the parser.


class ParsedAnswer:
    """A pipeline like `TextPipeline` that returns lists of parts instead of text, and the parser's finish reason.

    The parser gets the last token together with all the text that is left, so its last parts come out of `finish`.
    """

    __slots__ = ("_last", "_parser", "_parsing", "_rest", "_text")

    def __init__(self, text: TextPipeline, parser: AnswerParser, parsing: Parsing) -> None:
        self._text = text
        self._parser = parser
        self._parsing = parsing
        self._last: int | None = None
        self._rest = ""

    def push(self, token_id: int) -> Text:
        """Return the parts released by this token. Raises AnswerUnreadable."""
        text = self._text.push(token_id)
        if self._text.stopped is not None:
            self._last, self._rest = token_id, text
            return ""
        try:
            return self._parser.push(token_id, text) or ""
        except Exception as error:
            raise self._unreadable(error) from error

    def last(self, token_id: int, *, hidden: bool) -> Text:
        """Add the token with which the engine ended the answer; `hidden` if it is not part of the text."""
        self._last, self._rest = token_id, "" if hidden else self._text.push(token_id)
        return ""

    def finish(self) -> Text:
        """Return the last parts, at the end of the answer. Raises AnswerUnreadable."""
        text = self._rest + self._text.finish()
        try:
            return self._parser.finish(self._last, text) or ""
        except Exception as error:
            raise self._unreadable(error) from error

    @property
    def stopped(self) -> str | None:
        return self._text.stopped

    def verdict(self, reason: FinishReason) -> tuple[FinishReason, int]:
        """Return OpenAI's finish reason and the number of reasoning tokens, after `finish`. Raises AnswerUnreadable."""
        try:
            tokens = self._parser.reasoning_tokens()
        except Exception as error:
            raise self._unreadable(error) from error
        return finish_reason(self._parsing, reason, called=self._parser.called), tokens

    def _unreadable(self, error: Exception) -> AnswerUnreadable:
        metrics.UNREADABLE.inc()
        log.warning("parser.failed", parser=type(self._parser).__name__, error=repr(error))
        return AnswerUnreadable(f"the parser could not read the answer: {error!r}")


Outcome = Literal["same", "completed", "differs"]


def completion(
    streamed: OutputParts, whole: Callable[[], OutputParts], *, parser: str | None, request_id: str | None = None
) -> list[Part]:
    """Return the parts that complete a streamed answer to the one that is parsed as a whole, and count the outcome.

    Where the two contradict each other or the whole cannot be parsed, a line of log says so: the client has its answer then.
    """
    try:
        found = whole()
    except Exception as error:
        metrics.PARSED.labels("differs").inc()
        log.warning("parser.whole_failed", request_id=request_id, error=repr(error))
        return []
    outcome, missing = reconcile(streamed, found)
    metrics.PARSED.labels(outcome).inc()
    if outcome == "differs":
        log.info(
            "parser.streamed_differs",
            request_id=request_id,
            parser=parser,
            calls=[len(streamed.calls), len(found.calls)],
            content=[len(streamed.content), len(found.content)],
            reasoning=[len(streamed.reasoning), len(found.reasoning)],
        )
    return missing


def reconcile(streamed: OutputParts, whole: OutputParts) -> tuple[Outcome, list[Part]]:
    """Return the outcome and the parts missing in `streamed`, whose parts cannot be taken back.

    White space around content and reasoning, and the way arguments are spaced, make no difference.
    """
    reasoning = _rest(streamed.reasoning, whole.reasoning)
    content = _rest(streamed.content, whole.content)
    if reasoning is None or content is None or len(streamed.calls) > len(whole.calls):
        return "differs", []
    parts = [Part("reasoning", reasoning)] if reasoning else []
    if content:
        parts.append(Part("content", content))
    for index, call in enumerate(whole.calls):
        if index >= len(streamed.calls):
            parts.append(Part("tool", call.arguments, index, call.id, call.name))
            continue
        rest = _arguments(streamed.calls[index], call)
        if rest is None:
            return "differs", []
        if rest:
            parts.append(Part("tool", rest, index))
    return ("completed" if parts else "same"), parts


def _rest(streamed: str, whole: str) -> str | None:
    """Return the missing end of `streamed`, or None if it is not a beginning of `whole`."""
    if streamed.strip() == whole.strip():
        return ""
    return whole[len(streamed) :] if whole.startswith(streamed) else None


def _arguments(streamed: Call, whole: Call) -> str | None:
    if streamed.name != whole.name:
        return None
    if streamed.arguments.strip() == whole.arguments.strip() or _same_json(streamed.arguments, whole.arguments):
        return ""
    return whole.arguments[len(streamed.arguments) :] if whole.arguments.startswith(streamed.arguments) else None


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(msgspec.json.decode(one) == msgspec.json.decode(other))
    except msgspec.DecodeError:
        return False
