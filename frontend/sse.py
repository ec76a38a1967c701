"""The events of a streamed answer: the hot path of this process.

One event per row, as OpenAI shapes it.  Everything around the text of a choice is the same from the first event to the last, so
it is written once per answer; an event is then prefix + escaped text + suffix.  What waits for the socket goes out in one
write, each still its own event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from broker.messages import Finish, Row
from broker.said import plain
from frontend.errors import FrontendError
from frontend.logprobs import LogprobWriter
from frontend.usage import Tally
from frontend.writing import StreamWriter

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What every event and every answer of a request repeats. `created` is Unix time."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventForm:
    """How one API writes its events; `%b` in `text` and `first` is the JSON of the text."""

    object: str
    text: tuple[bytes, bytes]  # around the JSON string of a piece of text
    role: bytes | None  # what opens a choice; None = nothing does
    finish: bytes  # what takes the place of the text in the event that ends a choice
    chat: bool


CHAT_EVENTS = EventForm(
    object="chat.completion.chunk",
    text=(b'"delta":{"content":', b"}"),
    role=b'"delta":{"role":"assistant","content":""}',
    finish=b'"delta":{}',
    chat=True,
)
COMPLETION_EVENTS = EventForm(object="text_completion", text=(b'"text":', b""), role=None, finish=b'"text":""', chat=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """What the client wants to see besides text."""

    usage: bool = False  # one more event at the end
    usage_always: bool = False  # in every event
    token_ids: bool = False
    logprobs: LogprobWriter | None = None


class EventWriter(StreamWriter):
    """The events of chat and completions."""

    def __init__(
        self,
        form: EventForm,
        head: Head,
        tally: Tally,
        *,
        choices: int,
        options: EventOptions,
        echo: Sequence[str] = (),
        prompt_ids: Sequence[list[int]] = (),
    ) -> None:
        """`echo` and `prompt_ids`: what the first event of each choice brings along, one per choice or none at all."""
        self.open = choices
        self._form = form
        self._options = options
        self._tally = tally
        fixed = {"id": head.id, "object": form.object, "created": head.created, "model": head.model}
        self._start = b"data: " + _encode(fixed)[:-1] + b","
        self._fingerprint = b'"system_fingerprint":' + _encode(head.fingerprint) + b","
        before, after = form.text
        self._prefix = [self._start + b'"choices":[{"index":%d,' % i + before for i in range(choices)]
        plain_end = b'],"usage":null}\n\n' if options.usage else b"]}\n\n"
        self._suffix = after + b',"logprobs":null,"finish_reason":null}' + plain_end
        self._plain_end = plain_end
        self._simple = not (options.usage_always or options.token_ids or options.logprobs)
        self._first: list[bytes | None] | None = self._openings(choices, echo, prompt_ids)

    def _openings(self, choices: int, echo: Sequence[str], prompt_ids: Sequence[list[int]]) -> list[bytes | None] | None:
        form = self._form
        if form.role is None and not echo and not prompt_ids:
            return None
        openings: list[bytes | None] = []
        for i in range(choices):
            inner = form.role or form.text[0] + _encode(echo[i] if echo else "") + form.text[1]
            ids = b',"prompt_token_ids":' + _encode(prompt_ids[i]) if prompt_ids else b""
            end = self._plain_end if not (ids and form.chat) else ids.join((b"]", self._plain_end[1:]))
            extra = ids if not form.chat else b""
            openings.append(
                self._start
                + b'"choices":[{"index":%d,' % i
                + inner
                + b',"logprobs":null,"finish_reason":null'
                + extra
                + b"}"
                + end
            )
        return openings

    def events(self, rows: list[Row]) -> bytes:
        """All events of these rows, in order; empty when there is nothing to say (text is being held back)."""
        out: list[bytes] = []
        add = out.append
        tally = self._tally
        prefix, suffix, first = self._prefix, self._suffix, self._first
        simple = self._simple
        for row in rows:
            choice = row.choice
            if first is not None and (opening := first[choice]) is not None:
                add(opening)
                first[choice] = None
            texts = cast("list[str]", row.texts)  # nothing was taken apart here
            text = texts[0] if len(texts) == 1 else "".join(texts)
            tally.completion += len(row.ids)
            fin = row.fin
            if fin is not None and fin.tail:
                text += plain([fin.tail])
            if not simple:
                if text or row.ids:
                    add(self._full(choice, row, text))
            elif text:
                add(prefix[choice])
                add(_encode(text))
                add(suffix)
            if fin is not None:
                add(self._finish(choice, fin))
        return b"".join(out)

    def closing(self) -> bytes:
        """What follows the last row."""
        if not self._options.usage:
            return DONE
        usage = b'"choices":[],"usage":' + _encode(self._tally.usage()) + b"}\n\n"
        return self._start + self._fingerprint + usage + DONE

    def failure(self, error: FrontendError) -> bytes:
        """No [DONE] follows: the answer is not complete."""
        return b"data: " + error.body() + b"\n\n"

    def _full(self, choice: int, row: Row, text: str) -> bytes:
        """An event with more than text in it."""
        before, after = self._form.text
        options = self._options
        parts = [self._start, b'"choices":[{"index":%d,' % choice, before, _encode(text), after, b',"logprobs":']
        parts.append(_encode(self._logprobs(choice, row)))
        parts.append(b',"finish_reason":null')
        if options.token_ids:
            parts += (b',"token_ids":', _encode(row.ids))
        parts += (b"}", self._end())
        return b"".join(parts)

    def _logprobs(self, choice: int, row: Row) -> Any:
        writer = self._options.logprobs
        if writer is None or not row.logprobs:
            return None
        return writer.chat(row.logprobs) if self._form.chat else writer.completion(row.logprobs, choice)

    def _finish(self, choice: int, fin: Finish) -> bytes:
        self.open -= 1
        self._tally.end(choice, fin)
        reason = b',"logprobs":null,"finish_reason":' + _encode(fin.reason) + b',"stop_reason":' + _encode(fin.stop) + b"}"
        index = b'"choices":[{"index":%d,' % choice
        return b"".join((self._start, self._fingerprint, index, self._form.finish, reason, self._end()))

    def _end(self) -> bytes:
        if self._options.usage_always:
            return b'],"usage":' + _encode(self._tally.usage()) + b"}\n\n"
        return self._plain_end
