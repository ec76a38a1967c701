"""Reads a tool call as JSON, `{"name": "f", "arguments": {…}}`, while it is being generated.

Every character is read once. The arguments are returned unchanged, as soon as the name is known.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

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
        """Return whether the text is not such an object."""
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
        """Return whether this character, after the opening quote, ends the string."""
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
