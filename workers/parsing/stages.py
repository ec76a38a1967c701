"""Implements the built-in parsers as stages through which text runs: reasoning first, then tool calls.

Text may come in any pieces; a stage holds back only text that may still turn out to be a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from headrace.broker.messages import Part
from headrace.workers.parsing.call_json import CallReader

NewId = Callable[[int], str]
"""The id of the call with this index."""


class Stage(Protocol):
    """A parser stage that turns text into parts."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """Return the held-back parts, at the end of the answer."""


class Plain:
    """Passes all text on as content."""

    def push(self, text: str) -> list[Part]:
        return [Part("content", text)] if text else []

    def finish(self) -> list[Part]:
        return []


class Think:
    """Parses `<think>…</think>` at the beginning of an answer, or `…</think>` if the prompt opened it, as reasoning.

    Text after the closing mark goes to the next stage. White space before the opening mark is dropped.
    """

    OPEN, CLOSE = "<think>", "</think>"

    __slots__ = ("_held", "_inside", "_next", "_undecided")

    def __init__(self, following: Stage, *, opened: bool) -> None:
        self._next = following
        self._undecided = True  # The answer may still begin with the opening mark.
        self._inside = opened
        self._held = ""

    def push(self, text: str) -> list[Part]:
        if self._undecided:
            self._held += text
            text = self._held.lstrip()
            if len(text) < len(self.OPEN) and self.OPEN.startswith(text):
                return []
            self._undecided = False
            if text.startswith(self.OPEN):
                self._inside, text = True, text[len(self.OPEN) :]
            else:
                text = self._held
            self._held = ""
        if not self._inside:
            return self._next.push(text)
        text, self._held = self._held + text, ""
        reasoning, mark, content = text.partition(self.CLOSE)
        if mark:
            self._inside = False
        else:
            keep = overlap(text, self.CLOSE)
            reasoning, self._held = text[: len(text) - keep], text[len(text) - keep :]
        parts = [Part("reasoning", reasoning)] if reasoning else []
        return parts + self._next.push(content) if content else parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._inside:
            return [Part("reasoning", held)] if held else []
        return (self._next.push(held) if held else []) + self._next.finish()


class Hermes:
    """Parses calls written as `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, after optional content.

    Text between and after calls is dropped. Marked text that is not a call is returned as content.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    __slots__ = ("_held", "_index", "_new_id", "_raw", "_reader")

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._index = 0  # of the next call
        self._held = ""  # text that may be the beginning of a mark
        self._reader: CallReader | None = None  # reads the open call
        self._raw = ""  # text of the open call until its name is known

    def push(self, text: str) -> list[Part]:
        return list(self._push(self._held + text))

    def _push(self, text: str) -> Iterator[Part]:
        self._held = ""
        while text:
            mark = self.OPEN if self._reader is None else self.CLOSE
            before, found, rest = text.partition(mark)
            if not found:
                keep = overlap(text, mark)
                before, self._held = text[: len(text) - keep], text[len(text) - keep :]
            if self._reader is not None:
                yield from self._read(self._reader, before)
                if found:
                    yield from self._end()
            else:
                if before and self._index == 0:
                    yield Part("content", before)
                if found:
                    self._reader = CallReader("arguments")
            text = rest

    def _read(self, reader: CallReader, text: str) -> Iterator[Part]:
        named = reader.name is not None
        if not named:
            self._raw += text
        reader.read(text)
        if reader.name is None:
            return
        if not named:
            self._raw = ""
            yield Part("tool", reader.arguments(), self._index, self._new_id(self._index), reader.name)
        elif arguments := reader.arguments():
            yield Part("tool", arguments, self._index)

    def _end(self, mark: str = CLOSE) -> Iterator[Part]:
        reader, self._reader = self._reader, None
        if reader is not None and reader.name is not None:
            self._index += 1
        else:
            yield Part("content", self.OPEN + self._raw + mark)
        self._raw = ""

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._reader is not None:
            named = self._reader.name is not None
            return [] if named else list(self._end(held))
        return [Part("content", held)] if held and self._index == 0 else []


class NamedCall:
    """Parses all text as the arguments of a call of the named function."""

    __slots__ = ("_begun", "_name", "_new_id")

    def __init__(self, new_id: NewId, name: str) -> None:
        self._new_id, self._name = new_id, name
        self._begun = False

    def push(self, text: str) -> list[Part]:
        if self._begun:
            return [Part("tool", text)] if text else []
        if not text.strip():
            return []
        self._begun = True
        return [Part("tool", text.lstrip(), 0, self._new_id(0), self._name)]

    def finish(self) -> list[Part]:
        return []


class Required:
    """Parses `[{"name": "f", "parameters": {…}}, …]`. Text is dropped from the point where it is not such a list."""

    __slots__ = ("_dead", "_index", "_new_id", "_open", "_reader")

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._index = 0
        self._open = False
        self._dead = False
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Part]:
        return list(self._push(text))

    def _push(self, text: str) -> Iterator[Part]:
        while text and not self._dead:
            if self._reader is None:
                text = text.lstrip(" \t\r\n" if not self._open else ", \t\r\n")
                if not text:
                    return
                if not self._open and text[0] == "[":
                    self._open, text = True, text[1:]
                    continue
                self._dead = not self._open or text[0] != "{"
                self._reader = CallReader("parameters")
                continue
            named = self._reader.name is not None
            text = self._reader.read(text)
            if self._reader.name is not None:
                arguments = self._reader.arguments()
                if not named:
                    yield Part("tool", arguments, self._index, self._new_id(self._index), self._reader.name)
                elif arguments:
                    yield Part("tool", arguments, self._index)
            if self._reader.complete:
                self._index += self._reader.name is not None
                self._reader = None
            self._dead = self._reader is not None and self._reader.broken

    def finish(self) -> list[Part]:
        return []


def overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may begin `mark`. A whole mark does not count."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
