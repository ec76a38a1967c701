"""Writes rows as a message of the Messages API: as events per block, or as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from headrace.broker.jobs import parts_of
from headrace.broker.messages.frames import Finish, Row
from headrace.frontend.anthropic.schema import (
    AnswerBlock,
    AnthropicForm,
    MessageAnswer,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ThinkingCount,
    ToolUseBlock,
)
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.content_blocks import ContentBlock, ContentBlocks, arguments_of
from headrace.frontend.generation.sse import Head, StreamWriter, UsageCounter, WholeWriter

_encode = msgspec.json.Encoder().encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def signature_of(head: Head, block: ContentBlock) -> str:
    """Return an opaque signature for a block of thinking. It proves nothing and is never checked."""
    return sha256(f"{head.id}:{block.index}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why a message stopped. `sequence` is the stop sequence that ended it."""

    reason: StopReason
    sequence: str | None = None


def ending_of(fin: Finish, blocks: ContentBlocks, *, short: bool) -> Ending:
    """Return the ending of a message. `short`: the context had room for fewer tokens than requested."""
    if fin.reason == "length":
        return Ending("model_context_window_exceeded" if short else "max_tokens")
    if fin.reason == "content_filter":
        return Ending("refusal")
    last = blocks.all[-1]
    called = any(block.kind == "tool" for block in blocks.all)
    stopped = isinstance(fin.stop, str)
    if called and not (stopped and last.kind == "tool" and not _complete(last)):
        return Ending("tool_use")
    if isinstance(fin.stop, str):  # a truncated call must not run
        return Ending("stop_sequence", fin.stop)
    return Ending("end_turn")


def _complete(block: ContentBlock) -> bool:
    try:
        msgspec.json.decode(block.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def usage_of(counter: UsageCounter, *, ended: bool) -> MessageUsage:
    """Return the token usage. The number of cached tokens is known only at the end."""
    cached = counter.cached if ended else 0
    thought = ThinkingCount(thinking_tokens=counter.reasoning) if ended and counter.reasoning is not None else None
    return MessageUsage(
        input_tokens=counter.prompt - cached,
        cache_read_input_tokens=cached,
        output_tokens=counter.completion,
        output_tokens_details=thought,
    )


class MessageWriter(WholeWriter):
    def __init__(self, head: Head, counter: UsageCounter, *, short: bool = False) -> None:
        self.open = 1
        self._head = head
        self._counter = counter
        self._short = short
        self._blocks = ContentBlocks()
        self._ending = Ending("end_turn")

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            self._counter.completion += len(row.ids)
            self._blocks.take(parts_of(row.texts))
            if (fin := row.fin) is not None:
                if fin.tail:
                    self._blocks.take(parts_of([fin.tail]))
                self._blocks.end()
                self._ending = ending_of(fin, self._blocks, short=self._short)
                self._counter.end(0, fin)
                self.open -= 1

    def body(self) -> bytes:
        head, ending = self._head, self._ending
        return _encode(
            MessageAnswer(
                id=head.id,
                model=head.model,
                content=[self._block(block) for block in self._blocks.all],
                stop_reason=ending.reason,
                stop_sequence=ending.sequence,
                usage=usage_of(self._counter, ended=True),
            )
        )

    def _block(self, block: ContentBlock) -> AnswerBlock:
        if block.kind == "content":
            return TextBlock(text=block.text)
        if block.kind == "reasoning":
            return ThinkingBlock(thinking=block.text, signature=signature_of(self._head, block))
        return ToolUseBlock(id=block.id, name=block.name, input=arguments_of(block, self._head.id))


class MessageEvents(StreamWriter):
    def __init__(self, head: Head, counter: UsageCounter, form: AnthropicForm, *, short: bool = False) -> None:
        self.open = 1
        self._head = head
        self._counter = counter
        self._form = form
        self._short = short
        self._blocks = ContentBlocks()
        self._ending = Ending("end_turn")
        self._begun = False
        self._around: tuple[bytes, bytes] = (b"", b"")  # around a piece of text of the open block
        self._out: list[bytes] = []

    def events(self, rows: list[Row]) -> bytes:
        if not self._begun:
            self._begin()
        for row in rows:
            self._counter.completion += len(row.ids)
            self._take(row.texts)
            if (fin := row.fin) is not None:
                self._end(fin)
        out = b"".join(self._out)
        self._out.clear()
        return out

    def closing(self) -> bytes:
        delta = {"stop_reason": self._ending.reason, "stop_sequence": self._ending.sequence}
        usage = usage_of(self._counter, ended=True)
        return self._event("message_delta", b'"delta":%b,"usage":%b' % (_encode(delta), _encode(usage))) + STOP

    def failure(self, error: FrontendError) -> bytes:
        """Return the error event. No message_stop follows, because the message is not complete."""
        out = b"".join(self._out)
        self._out.clear()
        return out + self._form.event(error)

    def _begin(self) -> None:
        self._begun = True
        head = self._head
        message = MessageAnswer(id=head.id, model=head.model, content=[], usage=usage_of(self._counter, ended=False))
        self._out += (self._event("message_start", b'"message":' + _encode(message)), PING)

    def _take(self, texts: list[Any]) -> None:
        for what, block, text in self._blocks.take(parts_of(texts)):
            self._step(what, block, text)

    def _end(self, fin: Finish) -> None:
        if fin.tail:
            self._take([fin.tail])
        for what, block, text in self._blocks.end():
            self._step(what, block, text)
        self._ending = ending_of(fin, self._blocks, short=self._short)
        self._counter.end(0, fin)
        self.open -= 1

    def _step(self, what: str, block: ContentBlock, text: str) -> None:
        if what == "text":
            before, after = self._around
            self._out.append(before + _encode(text) + after)
        elif what == "open":
            self._open(block)
        else:
            if block.kind == "reasoning":
                signature = {"type": "signature_delta", "signature": signature_of(self._head, block)}
                inner = b'"index":%d,"delta":%b' % (block.index, _encode(signature))
                self._out.append(self._event("content_block_delta", inner))
            self._out.append(self._event("content_block_stop", b'"index":%d' % block.index))

    def _open(self, block: ContentBlock) -> None:
        empty: AnswerBlock
        if block.kind == "content":
            empty, kind, key = TextBlock(text=""), b"text_delta", b"text"
        elif block.kind == "reasoning":
            empty, kind, key = ThinkingBlock(thinking="", signature=""), b"thinking_delta", b"thinking"
        else:
            empty, kind, key = ToolUseBlock(id=block.id, name=block.name, input={}), b"input_json_delta", b"partial_json"
        self._out.append(self._event("content_block_start", b'"index":%d,"content_block":%b' % (block.index, _encode(empty))))
        name = b"content_block_delta"
        start = b'event: %b\ndata: {"type":"%b","index":%d,"delta":{"type":"%b","%b":' % (name, name, block.index, kind, key)
        self._around = (start, b"}}\n\n")

    @staticmethod
    def _event(kind: str, inner: bytes) -> bytes:
        name = kind.encode()
        return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (name, name, inner)
