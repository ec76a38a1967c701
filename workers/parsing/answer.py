"""The text pipeline of an answer that is taken apart: ids → characters → up to the stop string → parts."""

from __future__ import annotations

import structlog

from headrace.broker.messages import FinishReason, Parsing, Text
from headrace.workers import metrics
from headrace.workers.errors import AnswerUnreadable
from headrace.workers.parsing.interface import AnswerParser, finish_reason
from headrace.workers.text.pipeline import TextPipeline

log = structlog.get_logger()


class ParsedAnswer:
    """Like `TextPipeline`, with lists of parts for text, and a parser's word on how the answer ended.

    The parser gets the last token with all the text that is left: everything it says from then on is in `finish`.
    """

    __slots__ = ("_last", "_parser", "_parsing", "_rest", "_text")

    def __init__(self, text: TextPipeline, parser: AnswerParser, parsing: Parsing) -> None:
        self._text = text
        self._parser = parser
        self._parsing = parsing
        self._last: int | None = None
        self._rest = ""

    def push(self, token_id: int) -> Text:
        """Raises AnswerUnreadable."""
        text = self._text.push(token_id)
        if self._text.stopped is not None:
            self._last, self._rest = token_id, text
            return ""
        try:
            return self._parser.push(token_id, text) or ""
        except Exception as error:
            raise self._unreadable(error) from error

    def last(self, token_id: int, *, hidden: bool) -> Text:
        """The engine ended the answer with this token; `hidden` if it is no part of the text."""
        self._last, self._rest = token_id, "" if hidden else self._text.push(token_id)
        return ""

    def finish(self) -> Text:
        """Raises AnswerUnreadable."""
        text = self._rest + self._text.finish()
        try:
            return self._parser.finish(self._last, text) or ""
        except Exception as error:
            raise self._unreadable(error) from error

    @property
    def stopped(self) -> str | None:
        return self._text.stopped

    def verdict(self, reason: FinishReason) -> tuple[FinishReason, int]:
        """After `finish`: why the answer ended, as OpenAI's API says it, and how many tokens of it were reasoning."""
        try:
            tokens = self._parser.reasoning_tokens()
        except Exception as error:
            raise self._unreadable(error) from error
        return finish_reason(self._parsing, reason, called=self._parser.called), tokens

    def _unreadable(self, error: Exception) -> AnswerUnreadable:
        metrics.UNREADABLE.inc()
        log.warning("parser.failed", parser=type(self._parser).__name__, error=repr(error))
        return AnswerUnreadable(f"the parser could not read the answer: {error!r}")
