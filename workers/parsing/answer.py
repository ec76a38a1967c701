"""Turns the token ids of an answer into text, cuts it at the stop string, and parses it into parts."""

from __future__ import annotations

from typing import Literal

import msgspec
import structlog

from headrace.broker.jobs import Call, OutputParts
from headrace.broker.messages.frames import FinishReason, Part, Text
from headrace.broker.messages.requests import Parsing
from headrace.workers import metrics
from headrace.workers.detokenize import TextPipeline
from headrace.workers.errors import AnswerUnreadable
from headrace.workers.parsing.interface import AnswerParser, finish_reason

log = structlog.get_logger()


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
