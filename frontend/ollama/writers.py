"""Writes rows as answers of Ollama's API: as lines of JSON, of which the last one has the counts, or as a whole."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.broker.jobs import parts_of
from headrace.broker.messages.frames import Row, TokenLogprob
from headrace.frontend.answer_schema import UNSET, ContentLogprob
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.content_blocks import BlockStep, ContentBlock, ContentBlocks, arguments_of
from headrace.frontend.generation.sse import LogprobWriter, StreamWriter, UsageCounter, WholeWriter
from headrace.frontend.ollama.schema import (
    OllamaCalled,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaCounts,
    OllamaForm,
    OllamaPromptAnswer,
    OllamaSaid,
)

_encode = msgspec.json.Encoder().encode

NDJSON = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def now() -> str:
    """Return the time as Ollama's API writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class AnswerShape(ABC):
    """The shape of the answers of one route. `model` is the name that the client used."""

    def __init__(self, model: str) -> None:
        self.model = model

    @abstractmethod
    def record(self, content: str, thinking: str, calls: Sequence[OllamaCalled], **counts: Any) -> OllamaCounts:
        """Return a line with these pieces, or the whole answer."""


class ChatShape(AnswerShape):
    def record(self, content: str, thinking: str, calls: Sequence[OllamaCalled], **counts: Any) -> OllamaCounts:
        message = OllamaSaid(content=content, thinking=thinking or UNSET, tool_calls=list(calls) or UNSET)
        return OllamaChatAnswer(model=self.model, created_at=now(), message=message, **counts)


class PromptShape(AnswerShape):
    """The shape of `/api/generate`, which has no tool calls."""

    def record(self, content: str, thinking: str, calls: Sequence[OllamaCalled], **counts: Any) -> OllamaCounts:
        return OllamaPromptAnswer(model=self.model, created_at=now(), response=content, thinking=thinking or UNSET, **counts)


class AnswerRecord:
    """Takes the rows of an answer apart and measures its two phases, for both writers."""

    def __init__(self, counter: UsageCounter, *, logprobs: int | None = None) -> None:
        """`logprobs` is the number of alternatives; None = no log probabilities."""
        self.blocks = ContentBlocks()
        self.reason = "stop"
        self._counter = counter
        self._logprobs = LogprobWriter(logprobs, choices=1) if logprobs is not None else None
        self._began = time.perf_counter_ns()
        self._first = 0

    def take(self, row: Row) -> list[BlockStep]:
        self._first = self._first or time.perf_counter_ns()
        self._counter.completion += len(row.ids)
        steps = self.blocks.take(parts_of(row.texts))
        if (fin := row.fin) is not None:
            if fin.tail:
                steps += self.blocks.take(parts_of([fin.tail]))
            steps += self.blocks.end()
            self._counter.end(0, fin)
            self.reason = "length" if fin.reason == "length" else "stop"
        return steps

    def scored(self, items: Sequence[TokenLogprob] | None) -> list[ContentLogprob]:
        """Return the log probabilities of tokens; none if they were not asked for."""
        return self._logprobs.chat(items).content if self._logprobs is not None and items else []

    def counts(self) -> dict[str, Any]:
        """Return the counts of the ended answer. Models are always loaded, so that takes no time."""
        ended = time.perf_counter_ns()
        first = self._first or ended
        return {
            "done_reason": self.reason,
            "total_duration": ended - self._began,
            "load_duration": 0,
            "prompt_eval_count": self._counter.prompt,
            "prompt_eval_duration": first - self._began,
            "eval_count": self._counter.completion,
            "eval_duration": ended - first,
        }


def called(block: ContentBlock, index: int) -> OllamaCalled:
    function = OllamaCalledFunction(index=index, name=block.name, arguments=arguments_of(block, block.id))
    return OllamaCalled(id=block.id, function=function)


class OllamaWriter(WholeWriter):
    def __init__(self, shape: AnswerShape, record: AnswerRecord) -> None:
        self.open = 1
        self._shape = shape
        self._record = record
        self._scores: list[ContentLogprob] = []

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            self._record.take(row)
            self._scores += self._record.scored(row.logprobs)
            if row.fin is not None:
                self.open -= 1

    def body(self) -> bytes:
        blocks = self._record.blocks.all
        content = "".join(block.text for block in blocks if block.kind == "content")
        thinking = "".join(block.text for block in blocks if block.kind == "reasoning")
        calls = [called(block, i) for i, block in enumerate(block for block in blocks if block.kind == "tool")]
        counts = self._record.counts()
        return _encode(self._shape.record(content, thinking, calls, logprobs=self._scores or UNSET, **counts))


class OllamaLines(StreamWriter):
    """Writes an answer as lines: one for each piece of text and each whole tool call, and one with the counts."""

    comments = False  # a line must be JSON

    def __init__(self, shape: AnswerShape, record: AnswerRecord) -> None:
        self.open = 1
        self._shape = shape
        self._record = record
        self._scores: list[ContentLogprob] = []  # of tokens whose text has not come yet
        self._calls = 0

    def events(self, rows: list[Row]) -> bytes:
        out: list[bytes] = []
        for row in rows:
            self._scores += self._record.scored(row.logprobs)
            out += (self._step(step) for step in self._record.take(row))
            if row.fin is not None:
                self.open -= 1
        return b"".join(out)

    def closing(self) -> bytes:
        return self._line("", "", (), done=True, **self._record.counts())

    def failure(self, error: FrontendError) -> bytes:
        """Return the line that ends a stream with an error, without counts."""
        return OllamaForm()(error) + b"\n"

    def _step(self, step: BlockStep) -> bytes:
        block = step.block
        if block.kind == "tool":
            if step.what != "close":
                return b""
            self._calls += 1
            return self._line("", "", [called(block, self._calls - 1)], done=False)
        if step.what != "text":
            return b""
        content, thinking = (step.text, "") if block.kind == "content" else ("", step.text)
        return self._line(content, thinking, (), done=False)

    def _line(self, content: str, thinking: str, calls: Sequence[OllamaCalled], **counts: Any) -> bytes:
        record = self._shape.record(content, thinking, calls, logprobs=self._scores or UNSET, **counts)
        self._scores = []
        return _encode(record) + b"\n"
