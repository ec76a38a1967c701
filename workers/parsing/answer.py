"""Turns the token ids of an answer into text, cuts it at the stop string, and parses it into parts."""

from __future__ import annotations

import structlog

from headrace.broker.messages import FinishReason, Parsing, Text
from headrace.workers import metrics
from headrace.workers.errors import AnswerUnreadable
from headrace.workers.parsing.interface import AnswerParser, finish_reason
from headrace.workers.text.pipeline import TextPipeline

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
