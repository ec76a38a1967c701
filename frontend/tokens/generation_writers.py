"""Writes rows as the answers of `/inference/v1/generate`: token ids and, if wanted, their text, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.broker.messages import Finish, Row, TokenLogprob
from headrace.broker.output_parts import plain
from headrace.frontend.errors import FrontendError
from headrace.frontend.tokens.generation_schema import (
    CandidateToken,
    OutputMode,
    SampledToken,
    TextChoice,
    TextGenerationAnswer,
    TokenChoice,
    TokenGenerationAnswer,
    TokenGenerationEvent,
    TokenLogprobs,
)
from headrace.frontend.writers.base import StreamWriter, WholeWriter
from headrace.frontend.writers.logprobs import FLOOR, LogprobWriter, prompt_logprobs
from headrace.frontend.writers.sse import DONE, Head
from headrace.frontend.writers.usage import UsageCounter

_encode = msgspec.json.Encoder().encode


class TokenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an answer. `logprobs` is the number of alternatives, `prompt_ids` the prompt if it is to be given back."""

    mode: OutputMode
    choices: int
    logprobs: int | None = None
    prompt_ids: list[int] | None = None
    usage: bool = False  # one more event at the end
    usage_always: bool = False  # in every event


class TokenForm:
    """Makes choices out of rows, in one of the two output modes."""

    def __init__(self, options: TokenOptions) -> None:
        self._top = options.logprobs
        self._named = LogprobWriter(options.logprobs or 0, choices=options.choices)

    def tokens(self, index: int, ids: list[int], items: Sequence[TokenLogprob], fin: Finish | None) -> TokenChoice:
        """Return a choice with these ids."""
        logprobs = None
        if self._top is not None:
            logprobs = TokenLogprobs(content=[_sampled(item, max(self._top, 1)) for item in items])
        reason, stop = _ending(fin)
        return TokenChoice(index=index, logprobs=logprobs, finish_reason=reason, stop_reason=stop, token_ids=ids)

    def text(self, index: int, ids: list[int], text: str, items: Sequence[TokenLogprob], fin: Finish | None) -> TextChoice:
        """Return a choice with these ids and their text."""
        logprobs = self._named.chat(items) if self._top is not None else None
        reason, stop = _ending(fin)
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason, stop_reason=stop, token_ids=ids)


def _ending(fin: Finish | None) -> tuple[str | None, int | str | None]:
    return (fin.reason, fin.stop) if fin is not None else (None, None)


def _sampled(item: TokenLogprob, most: int) -> SampledToken:
    """Return a token with `most` alternatives, of which it is the first."""
    ranked = [
        CandidateToken(token_id=token, logprob=max(value, FLOOR), rank=i) for i, (token, _, value) in enumerate(item.top, 1)
    ]
    rank = next((other.rank for other in ranked if other.token_id == item.id), None)
    itself = CandidateToken(token_id=item.id, logprob=max(item.logprob, FLOOR), rank=rank)
    others = [other for other in ranked if other.token_id != item.id]
    top = [itself, *others][:most]
    return SampledToken(token_id=item.id, logprob=itself.logprob, rank=rank, top_logprobs=top)


def _text_of(row: Row) -> str:
    return plain(row.texts if row.fin is None or not row.fin.tail else [*row.texts, row.fin.tail])


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fin: Finish | None = None


class TokenWriter(WholeWriter):
    """Writes the whole answer."""

    def __init__(self, head: Head, counter: UsageCounter, options: TokenOptions) -> None:
        self.open = options.choices
        self._head = head
        self._counter = counter
        self._options = options
        self._form = TokenForm(options)
        self._choices = [_Choice() for _ in range(options.choices)]

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            choice = self._choices[row.choice]
            choice.ids += row.ids
            choice.texts.append(_text_of(row))
            choice.logprobs += row.logprobs or ()
            self._counter.completion += len(row.ids)
            if (fin := row.fin) is not None:
                choice.fin = fin
                self.open -= 1
                self._counter.end(row.choice, fin)

    def body(self) -> bytes:
        head, form = self._head, self._form
        first = self._choices[0].fin
        scored = first.prompt_logprobs if first is not None else None
        common: dict[str, Any] = {
            "request_id": head.id,
            "model": head.model,
            "created": head.created,
            "usage": self._counter.usage(),
            "prompt_logprobs": prompt_logprobs(scored) if scored is not None else None,
            "prompt_token_ids": self._options.prompt_ids,
        }
        each = enumerate(self._choices)
        if self._options.mode == "text":
            texts = [form.text(i, c.ids, "".join(c.texts), c.logprobs, c.fin) for i, c in each]
            return _encode(TextGenerationAnswer(choices=texts, **common))
        return _encode(TokenGenerationAnswer(choices=[form.tokens(i, c.ids, c.logprobs, c.fin) for i, c in each], **common))


class TokenEvents(StreamWriter):
    """Writes the events of a streamed answer: one for each row with ids, text or an end."""

    def __init__(self, head: Head, counter: UsageCounter, options: TokenOptions) -> None:
        self.open = options.choices
        self._id = head.id
        self._counter = counter
        self._options = options
        self._form = TokenForm(options)
        self._prompt_ids = options.prompt_ids

    def events(self, rows: list[Row]) -> bytes:
        return b"".join(self._event(row) for row in rows)

    def closing(self) -> bytes:
        if not self._options.usage:
            return DONE
        last = TokenGenerationEvent(
            request_id=self._id, output_mode=self._options.mode, choices=[], usage=self._counter.usage()
        )
        return _data(last) + DONE

    def failure(self, error: FrontendError) -> bytes:
        """Return the error event. No [DONE] follows, because the answer is not complete."""
        return b"data: " + error.body() + b"\n\n"

    def _event(self, row: Row) -> bytes:
        fin, text = row.fin, _text_of(row)
        self._counter.completion += len(row.ids)
        if fin is not None:
            self.open -= 1
            self._counter.end(row.choice, fin)
        elif not row.ids and (not text or self._options.mode == "tokens"):
            return b""
        form, items = self._form, row.logprobs or ()
        event = TokenGenerationEvent(
            request_id=self._id,
            output_mode=self._options.mode,
            choices=[form.text(row.choice, row.ids, text, items, fin)]
            if self._options.mode == "text"
            else [form.tokens(row.choice, row.ids, items, fin)],
            usage=self._counter.usage() if self._options.usage_always else None,
        )
        if self._prompt_ids is not None:
            event.prompt_token_ids, self._prompt_ids = self._prompt_ids, None
        return _data(event)


def _data(event: TokenGenerationEvent) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"
