"""Implements the built-in parsers as stages through which text runs: reasoning first, then tool calls.

Text may come in any pieces; a stage holds back only text that may still turn out to be a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Protocol

import msgspec

from headrace.broker.messages.frames import Part

# Reads a tool call as JSON, `{"name": "f", "arguments": {…}}`, while it is being generated.
#
# Every character is read once. The arguments are returned unchanged, as soon as the name is known.

_SPACE = " \t\r\n"


class _At(Enum):
    BEFORE = auto()  # the opening brace
    KEY = auto()  # a key, a comma or the closing brace
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # the first character of a value
    IN_VALUE = auto()
    AFTER = auto()  # the closing brace
    BROKEN = auto()


class CallReader:
    """Reads a call from text fed to `read`, which returns the unread text: everything after the closing brace."""

    __slots__ = ("_arguments_key", "_at", "_depth", "_escaped", "_fresh", "_key", "_quoted", "_scalar", "_word", "name")

    def __init__(self, arguments_key: str) -> None:
        self.name: str | None = None
        self._arguments_key = arguments_key
        self._at = _At.BEFORE
        self._key = ""
        self._word = ""  # of a key or the name, as it is written
        self._fresh = ""  # arguments that have not been returned yet
        self._depth = 0  # of the value
        self._quoted = self._escaped = self._scalar = False

    @property
    def complete(self) -> bool:
        return self._at is _At.AFTER

    @property
    def broken(self) -> bool:
        return self._at is _At.BROKEN

    def arguments(self) -> str:
        """Return the arguments' text since the last call; nothing before the name is known."""
        if self.name is None:
            return ""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def read(self, text: str) -> str:
        for index, char in enumerate(text):
            if self._at is _At.AFTER or self._at is _At.BROKEN:
                return text[index:]
            self._step(char)
        return ""

    def _step(self, char: str) -> None:
        at = self._at
        if at is _At.IN_VALUE:
            self._value(char)
        elif at is _At.IN_KEY:
            self._word += char
            if self._string(char):
                self._key, self._word, self._at = _decoded(self._word) or "", "", _At.COLON
        elif char in _SPACE:
            return
        elif at is _At.VALUE:
            self._begin_value(char)
        elif at is _At.BEFORE and char == "{":
            self._at = _At.KEY
        elif at is _At.KEY and char == "}":
            self._at = _At.AFTER
        elif at is _At.KEY and char == '"':
            self._at, self._word = _At.IN_KEY, char
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at is not _At.KEY or char != ",":
            self._at = _At.BROKEN

    def _begin_value(self, char: str) -> None:
        self._at, self._depth = _At.IN_VALUE, 0
        self._quoted, self._escaped, self._word = False, False, ""
        self._scalar = char not in '"{['
        if char in "}],:":
            self._at = _At.BROKEN
            return
        self._take(char)
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth = 1

    def _value(self, char: str) -> None:
        if self._quoted:
            self._take(char)
            if self._string(char):
                self._quoted = False
                if self._depth == 0:
                    self._end_value()
        elif self._scalar and (char in ",}" or char in _SPACE):
            self._end_value()
            if char == "}":
                self._at = _At.AFTER
        else:
            self._take(char)
            if char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._end_value()

    def _string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        else:
            return char == '"'
        return False

    def _take(self, char: str) -> None:
        if self._key == self._arguments_key:
            self._fresh += char
        elif self._key == "name":
            self._word += char

    def _end_value(self) -> None:
        if self._key == "name" and self.name is None:
            self.name = _decoded(self._word) or None
            if self.name is None:
                self._at = _At.BROKEN
                return
        self._word, self._key, self._at = "", "", _At.KEY


def _decoded(word: str) -> str | None:
    """Return the text of a JSON string, or None if `word` is not one."""
    try:
        value = msgspec.json.decode(word)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, str) else None


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
