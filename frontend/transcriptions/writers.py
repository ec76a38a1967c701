"""Writes rows as a transcript: as JSON, as plain text, or as OpenAI's events."""

from __future__ import annotations

import msgspec

from headrace.broker.messages import Row
from headrace.broker.output_parts import parts_of
from headrace.frontend.errors import FrontendError
from headrace.frontend.transcriptions.schema import ResponseFormat, SpeechUsage, Transcript, TranscriptDelta, TranscriptDone
from headrace.frontend.writers.base import StreamWriter, WholeWriter
from headrace.frontend.writers.usage import UsageCounter

_encode = msgspec.json.Encoder().encode


class _Text:
    """Collects the text of the one choice."""

    def __init__(self, counter: UsageCounter) -> None:
        self.said: list[str] = []
        self._counter = counter

    def take(self, row: Row) -> str:
        """Add a row, and return its text."""
        fin = row.fin
        texts = row.texts if fin is None or not fin.tail else [*row.texts, fin.tail]
        text = "".join(part.text for part in parts_of(texts) if part.kind == "content")
        self.said.append(text)
        self._counter.completion += len(row.ids)
        if fin is not None:
            self._counter.end(0, fin)
        return text

    def whole(self) -> str:
        """Return the text without the space that models begin and end with."""
        return "".join(self.said).strip()

    def usage(self) -> SpeechUsage:
        counter = self._counter
        prompt, text = counter.prompt, counter.completion
        return SpeechUsage(input_tokens=prompt, output_tokens=text, total_tokens=prompt + text)


class TranscriptWriter(WholeWriter):
    """Writes the transcript as a whole."""

    def __init__(self, counter: UsageCounter, form: ResponseFormat) -> None:
        self.open = 1
        self._text = _Text(counter)
        self._plain = form == "text"
        if self._plain:
            self.content_type = b"text/plain; charset=utf-8"

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            self._text.take(row)
            if row.fin is not None:
                self.open -= 1

    def body(self) -> bytes:
        text = self._text.whole()
        if self._plain:
            return f"{text}\n".encode()
        return _encode(Transcript(text=text, usage=self._text.usage()))


class TranscriptEvents(StreamWriter):
    """Writes the transcript as events: its pieces, then all of it."""

    def __init__(self, counter: UsageCounter, form: ResponseFormat) -> None:
        self.open = 1
        self._text = _Text(counter)

    def events(self, rows: list[Row]) -> bytes:
        out: list[bytes] = []
        for row in rows:
            if text := self._text.take(row):
                out.append(_event(TranscriptDelta(delta=text)))
            if row.fin is not None:
                self.open -= 1
        return b"".join(out)

    def closing(self) -> bytes:
        return _event(TranscriptDone(text=self._text.whole(), usage=self._text.usage()))

    def failure(self, error: FrontendError) -> bytes:
        """Return the event that ends a stream with an error, in place of the whole text."""
        return b"data: " + error.body() + b"\n\n"


def _event(event: TranscriptDelta | TranscriptDone) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"
