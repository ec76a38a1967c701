"""Splits an answer into a sequence of content blocks, for APIs that stream typed items instead of one message.

A block is a stretch of reasoning, a stretch of text or a tool call. Blocks do not overlap: each begins after the end of the one
before. The steps of every answer are well formed: open, pieces, close, and at least one block.

White space before a block of text is held back, because parsers pass on the line breaks between calls. It is dropped, instead
of becoming a block, unless the answer consists of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from headrace.broker.messages import Part
from headrace.frontend.errors import FrontendError

Kind = Literal["content", "reasoning", "tool"]


class PartsOutOfOrder(FrontendError, status=502, code="engine_error"):
    """The model's tool parser went back to a call that had ended."""


class ContentBlock:
    """A block. `index` is the number of blocks before it; `id` and `name` are those of a tool call."""

    __slots__ = ("_pieces", "call", "id", "index", "kind", "name")

    def __init__(self, kind: Kind, index: int, part: Part) -> None:
        self.kind = kind
        self.index = index
        self.call = part.index
        self.id = part.id or ""
        self.name = part.name or ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Return the text so far; for a tool call the JSON of its arguments."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, text: str) -> None:
        """Add a piece of text."""
        self._pieces.append(text)


class BlockStep(NamedTuple):
    """A step of a block. `text` is the new text of a "text" step."""

    what: Literal["open", "text", "close"]
    block: ContentBlock
    text: str = ""


_EMPTY = Part("content")


class ContentBlocks:
    """The blocks of one choice. Call `take` with its parts, then `end` once."""

    __slots__ = ("_current", "_held", "_last_call", "all")

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self._current: ContentBlock | None = None
        self._held = ""
        self._last_call = -1

    def take(self, parts: Iterable[Part]) -> list[BlockStep]:
        """Add parts and return their steps. Raises PartsOutOfOrder."""
        steps: list[BlockStep] = []
        for part in parts:
            if part.kind == "tool":
                self._call(part, steps)
            elif part.text:
                self._text(part, steps)
        return steps

    def end(self) -> list[BlockStep]:
        """Close the open block and return the last steps. An empty answer has one empty block of text."""
        steps: list[BlockStep] = []
        if not self.all:
            self._open("content", _EMPTY, steps)
            if self._held:
                self._piece(self._held, steps)
        self._close(steps)
        self._held = ""
        return steps

    def _text(self, part: Part, steps: list[BlockStep]) -> None:
        current = self._current
        text = part.text
        if current is None or current.kind != part.kind:
            if part.kind == "content":
                text = self._held + text
                if text.isspace():
                    self._held = text
                    return
            self._held = ""
            self._open(part.kind, part, steps)
        self._piece(text, steps)

    def _call(self, part: Part, steps: list[BlockStep]) -> None:
        current = self._current
        if current is None or current.kind != "tool" or current.call != part.index:
            if part.index <= self._last_call:
                if not part.text:
                    return
                raise PartsOutOfOrder
            self._held = ""
            self._last_call = part.index
            self._open("tool", part, steps)
        if part.text:
            self._piece(part.text, steps)

    def _open(self, kind: Kind, part: Part, steps: list[BlockStep]) -> None:
        self._close(steps)
        block = self._current = ContentBlock(kind, len(self.all), part)
        self.all.append(block)
        steps.append(BlockStep("open", block))

    def _piece(self, text: str, steps: list[BlockStep]) -> None:
        block = self._current
        assert block is not None  # noqa: S101  # opened just before
        block.add(text)
        if steps and steps[-1].what == "text":  # always of the same block: opening one is a step
            steps[-1] = BlockStep("text", block, steps[-1].text + text)
        else:
            steps.append(BlockStep("text", block, text))

    def _close(self, steps: list[BlockStep]) -> None:
        if self._current is not None:
            steps.append(BlockStep("close", self._current))
            self._current = None
