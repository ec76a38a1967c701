"""Writers that turn the rows of a request into bytes: their base classes, usage, log probabilities, and streamed events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.broker.jobs import plain
from headrace.broker.messages.frames import Finish, Row, TokenLogprob
from headrace.broker.messages.requests import Parsing
from headrace.frontend.answer_schema import (
    UNSET,
    CachedTokens,
    ChatLogprobs,
    CompletionLogprobs,
    CompletionTokens,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    Usage,
)
from headrace.frontend.errors import FrontendError


class StreamWriter(ABC):
    """Writes an answer as server-sent events or lines. `open` counts the choices that have not ended."""

    open: int
    unsettled: bool = False  # `settle` is to be awaited between the last row and `closing`
    comments: bool = True  # comments may stand between the events, so that proxies do not give up

    @abstractmethod
    def events(self, rows: list[Row]) -> bytes:
        """Return the events of these rows, in order; empty if there are none."""

    async def settle(self) -> None:
        """Finish work that the answer must wait for, such as storing it. Ends in bounded time and raises nothing."""
        return

    @abstractmethod
    def closing(self) -> bytes:
        """Return the events after the last row."""

    @abstractmethod
    def failure(self, error: FrontendError) -> bytes:
        """Return the events that end a stream with an error, so that it does not look complete."""


class WholeWriter(ABC):
    """Writes an answer as a whole. `open` counts the choices that have not ended."""

    open: int
    unsettled: bool = False  # `settle` is to be awaited between the last row and `body`
    content_type: bytes = b"application/json"

    @abstractmethod
    def take(self, rows: list[Row]) -> None:
        """Add rows to the answer."""

    async def settle(self) -> None:
        """Finish work that the answer must wait for. An exception becomes the answer."""
        return

    @abstractmethod
    def body(self) -> bytes:
        """Return the answer, JSON unless `content_type` says otherwise. Call it once `open` is 0."""


class UsageCounter:
    """The tokens of a request over all its prompts and choices."""

    __slots__ = ("_cached", "_prompts", "_share", "cached", "completion", "ended", "prompt", "reasoning")

    def __init__(self, prompt_tokens: list[int], choices: int, *, reasoning: bool = False) -> None:
        """`prompt_tokens` has the tokens per prompt, `choices` the choices per prompt. `reasoning`: count reasoning tokens."""
        self._prompts = prompt_tokens
        self._share = choices
        self.prompt = sum(prompt_tokens)
        self.cached = 0  # tokens of the prompts that were found in a cache
        self.completion = 0
        self.ended = False  # True once a choice has ended
        self.reasoning: int | None = 0 if reasoning else None
        self._cached: list[int | None] = [None] * len(prompt_tokens)

    def fresh(self) -> UsageCounter:
        """Return a counter of the same prompts that has counted nothing."""
        return UsageCounter(list(self._prompts), self._share, reasoning=self.reasoning is not None)

    def end(self, choice: int, fin: Finish) -> None:
        """Count the end of a choice. Of the cached tokens of a prompt's choices the minimum counts.

        The choices of a prompt find each other's blocks in the cache, so only the minimum was cached before the request.
        """
        prompt = choice // self._share
        if fin.prompt_tokens > self._prompts[prompt]:  # media may have more
            self.prompt += fin.prompt_tokens - self._prompts[prompt]
            self._prompts[prompt] = fin.prompt_tokens
        known = self._cached[prompt]
        if known is None or fin.cached_tokens < known:
            self.cached += fin.cached_tokens - (known or 0)
            self._cached[prompt] = fin.cached_tokens
        self.ended = True
        if self.reasoning is not None:
            self.reasoning += fin.reasoning_tokens

    def usage(self) -> Usage:
        """Return the counts in OpenAI's form."""
        return Usage(
            prompt_tokens=self.prompt,
            completion_tokens=self.completion,
            total_tokens=self.prompt + self.completion,
            prompt_tokens_details=CachedTokens(self.cached),
            completion_tokens_details=CompletionTokens(self.reasoning) if self.reasoning is not None else UNSET,
        )


FLOOR = -9999.0  # JSON has no infinity


class LogprobWriter:
    """Writes `top` alternatives per token. `as_ids` writes tokens as `token_id:N`, as some are no valid text."""

    __slots__ = ("_as_ids", "_offsets", "_top")

    def __init__(self, top: int, *, choices: int, as_ids: bool = False) -> None:
        self._top = top
        self._as_ids = as_ids
        self._offsets = [0] * choices

    def _name(self, token_id: int, raw: bytes) -> str:
        return f"token_id:{token_id}" if self._as_ids else raw.decode("utf-8", "replace")

    def chat(self, items: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ContentLogprob(
                    self._name(item.id, item.token),
                    max(item.logprob, FLOOR),
                    list(item.token),
                    [self._alternative(i, raw, value) for i, raw, value in item.top[: self._top]],
                )
                for item in items
            ]
        )

    def _alternative(self, token_id: int, raw: bytes, value: float) -> TopLogprob:
        """Return an alternative. For tokens written as ids, the bytes are those of the id's text, as in vLLM's server."""
        name = self._name(token_id, raw)
        return TopLogprob(name, max(value, FLOOR), list(name.encode() if self._as_ids else raw))

    def completion(
        self, items: Sequence[TokenLogprob | None], choice: int, *, first: tuple[int, str] = (0, "")
    ) -> CompletionLogprobs:
        """Return log probabilities in the form of the completions API.

        None stands for `first`: id and text of the first token of an echoed prompt.
        """
        out = CompletionLogprobs([], [], [], [])
        offset = self._offsets[choice]
        for item in items:
            if item is None:
                name = f"token_id:{first[0]}" if self._as_ids else first[1]
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
            else:
                name = self._name(item.id, item.token)
                value = max(item.logprob, FLOOR)
                top = {self._name(i, raw): max(v, FLOOR) for i, raw, v in item.top[: self._top]}
                top.setdefault(name, value)  # always include the chosen token
                out.token_logprobs.append(value)
                out.top_logprobs.append(top)
            out.tokens.append(name)
            out.text_offset.append(offset)
            offset += len(name)
        self._offsets[choice] = offset
        return out


def prompt_logprobs(items: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Return log probabilities of a prompt: per position its own token first, then the likeliest ones."""
    return [None if item is None else _alternatives(item) for item in items]


def _alternatives(item: TokenLogprob) -> dict[str, PromptLogprob]:
    found = {str(item.id): PromptLogprob(max(item.logprob, FLOOR), item.rank or None, item.token.decode("utf-8", "replace"))}
    for rank, (token_id, raw, value) in enumerate(item.top, 1):
        found.setdefault(str(token_id), PromptLogprob(max(value, FLOOR), rank, raw.decode("utf-8", "replace")))
    return found


# Writes the events of a streamed answer of chat and completions: the hot path of this process.
#
# Every row becomes one event in OpenAI's shape. The bytes around the text of a choice are the same in all events, so they are
# made once per answer, and an event is prefix + escaped text + suffix. Events that wait for the socket are sent in one write.

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


class Head(msgspec.Struct, frozen=True):
    """The fields that all events and answers of a request repeat. `created` is Unix time."""

    id: str
    created: int
    model: str
    fingerprint: str
    service_tier: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventForm:
    """The form of one API's events."""

    object: str
    text: tuple[bytes, bytes]  # around the JSON string of a piece of text
    role: tuple[bytes, bytes] | None  # around the JSON string of the role in a choice's first event; None = no such event
    finish: bytes  # in place of the text in the event that ends a choice
    chat: bool


CHAT_EVENTS = EventForm(
    object="chat.completion.chunk",
    text=(b'"delta":{"content":', b"}"),
    role=(b'"delta":{"role":', b',"content":""}'),
    finish=b'"delta":{}',
    chat=True,
)
COMPLETION_EVENTS = EventForm(object="text_completion", text=(b'"text":', b""), role=None, finish=b'"text":""', chat=False)


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an answer besides its text. `echo` and `prompt_ids` have one entry per choice, or none."""

    usage: bool = False  # one more event at the end
    usage_always: bool = False  # in every event
    token_ids: bool = False
    logprobs: LogprobWriter | None = None
    role: str = "assistant"
    parse: Parsing | None = None
    freeform: frozenset[str] = frozenset()  # names of tools whose input is plain text
    echo: Sequence[str] = ()
    echo_first: Sequence[tuple[int, str]] = ()  # the prompts' first tokens, if `echo` includes log probabilities
    prompt_ids: Sequence[list[int]] = ()
    prompt_text: str | None = None
    prompt_logprobs: bool = False
    silent: bool = False  # leave out the model's output, because only the prompt is wanted


class EventWriter(StreamWriter):
    """Writes the events of chat and completions."""

    def __init__(
        self,
        form: EventForm,
        head: Head,
        counter: UsageCounter,
        *,
        choices: int,
        options: AnswerOptions,
    ) -> None:
        self.open = choices
        self.form = form
        self.options = options
        self.counter = counter
        fixed: dict[str, Any] = {"id": head.id, "object": form.object, "created": head.created, "model": head.model}
        if head.service_tier is not None and form.chat:
            fixed["service_tier"] = head.service_tier
        self._start = b"data: " + _encode(fixed)[:-1] + b","
        self._fingerprint = b'"system_fingerprint":' + _encode(head.fingerprint) + b","
        before, after = form.text
        self._prefix = [self._start + b'"choices":[{"index":%d,' % i + before for i in range(choices)]
        plain_end = b'],"usage":null}\n\n' if options.usage else b"]}\n\n"
        self._suffix = after + b',"logprobs":null,"finish_reason":null}' + plain_end
        self._plain_end = plain_end
        self._simple = not (options.usage_always or options.token_ids or options.logprobs)
        self.tells_tokens = bool(options.token_ids or options.logprobs)  # write an event even for rows without text
        self._first: list[bytes | None] | None = self._openings(choices)

    def _openings(self, choices: int) -> list[bytes | None] | None:
        form, options = self.form, self.options
        echo, prompt_ids = options.echo, options.prompt_ids
        if form.role is None and not echo and not prompt_ids:
            return None
        openings: list[bytes | None] = []
        role = form.role[0] + _encode(options.role) + form.role[1] if form.role is not None else b""
        if not echo and not prompt_ids and options.prompt_text is None:  # the usual case
            return [self._opening(i, role) for i in range(choices)]
        for i in range(choices):
            text = form.text[0] + _encode(echo[i] if echo else "") + form.text[1]
            ids = b',"prompt_token_ids":' + _encode(prompt_ids[i]) if prompt_ids else b""
            if form.role is None:
                openings.append(self._opening(i, text, in_choice=ids))
                continue
            if options.prompt_text is not None:
                ids += b',"prompt_text":' + _encode(options.prompt_text)
            echoed = self._opening(i, text) if echo and echo[i] else b""
            openings.append(self._opening(i, role, beside=ids) + echoed)
        return openings

    def _opening(self, choice: int, inner: bytes, *, in_choice: bytes = b"", beside: bytes = b"") -> bytes:
        index = b'"choices":[{"index":%d,' % choice
        nothing = b',"logprobs":null,"finish_reason":null'
        return b"".join((self._start, index, inner, nothing, in_choice, b"}]", beside, self._plain_end[1:]))

    def opening(self, choice: int) -> bytes | None:
        """Return the first event of a choice at the first call, then None."""
        if self._first is None or (opening := self._first[choice]) is None:
            return None
        self._first[choice] = None
        return opening

    def events(self, rows: list[Row]) -> bytes:
        """Return the events of these rows, in order; empty if the worker holds the text back."""
        out: list[bytes] = []
        counter = self.counter
        prefix, suffix, first = self._prefix, self._suffix, self._first
        simple = self._simple
        before, after = self.form.text
        encode = _encode
        for row in rows:
            choice = row.choice
            if first is not None:
                if (opening := first[choice]) is not None:
                    out.append(opening)
                    first[choice] = None
                if not any(first):
                    first = self._first = None
            texts: list[str] = row.texts  # type: ignore[assignment]  # answers of this writer are not parsed
            text = "".join(texts)
            counter.completion += len(row.ids)
            fin = row.fin
            if fin is not None and fin.tail:
                text += plain([fin.tail])
            if not simple:
                if text or row.ids:
                    out.append(self.event(choice, before + encode(text) + after, row.ids, self.logprobs(choice, row)))
            elif text:
                out += (prefix[choice], encode(text), suffix)
            if fin is not None:
                out.append(self.finish(choice, fin))
        return b"".join(out)

    def closing(self) -> bytes:
        if not self.options.usage:
            return DONE
        usage = b'"choices":[],"usage":' + _encode(self.counter.usage()) + b"}\n\n"
        return self._start + self._fingerprint + usage + DONE

    def failure(self, error: FrontendError) -> bytes:
        """Return the error event. No [DONE] follows, because the answer is not complete."""
        return b"data: " + error.body() + b"\n\n"

    def event(self, choice: int, inner: bytes, ids: list[int], logprobs: bytes) -> bytes:
        """Return an event with all its fields around `inner`, the text or delta. `logprobs` is JSON."""
        parts = [self._start, b'"choices":[{"index":%d,' % choice, inner, b',"logprobs":', logprobs, b',"finish_reason":null']
        if self.options.token_ids:
            parts += (b',"token_ids":', _encode(ids))
        parts += (b"}", self._end())
        return b"".join(parts)

    def logprobs(self, choice: int, row: Row) -> bytes:
        writer = self.options.logprobs
        if writer is None or not row.logprobs:
            return b"null"
        return _encode(writer.chat(row.logprobs) if self.form.chat else writer.completion(row.logprobs, choice))

    def finish(self, choice: int, fin: Finish) -> bytes:
        self.open -= 1
        self.counter.end(choice, fin)
        reason = b',"logprobs":null,"finish_reason":' + _encode(fin.reason) + b',"stop_reason":' + _encode(fin.stop) + b"}"
        index = b'"choices":[{"index":%d,' % choice
        return b"".join((self._start, self._fingerprint, index, self.form.finish, reason, self._end()))

    def _end(self) -> bytes:
        if self.options.usage_always:
            return b'],"usage":' + _encode(self.counter.usage()) + b"}\n\n"
        return self._plain_end
