"""Carries freeform tools, whose input is plain text, through models and parsers that know functions with JSON arguments only.

A freeform tool (`custom` in OpenAI's APIs) becomes a function with one text parameter, and the text is read out of the
arguments while they are being generated. A regex becomes the `pattern` of that parameter, which structured output keeps to
wherever a call is forced. A lark grammar has no place in a JSON schema: it is part of the description, so the model sees it and
nothing enforces it, as nothing enforces the schema of a function that the model chooses to call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import Any

import msgspec

from headrace.broker.messages import Part
from headrace.frontend.schema.chat import CustomTool

INPUT = "input"

_HEAD = f'{{"{INPUT}":"'
_SPACE_BEFORE = frozenset({0, 1, len(INPUT) + 3, len(INPUT) + 4})  # places in the head where JSON allows white space
_SPACE = " \t\r\n"
_SPECIAL = re.compile(r'["\\]')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNPAIRED = "\ufffd"


def as_function(tool: CustomTool) -> dict[str, Any]:
    """Return the function that stands for a freeform tool, with the keys that chat templates print."""
    described = [tool.description] if tool.description else []
    parameter: dict[str, Any] = {"type": "string", "description": "the whole input of the tool, as plain text"}
    grammar = tool.format.grammar if tool.format is not None else None
    if grammar is not None:
        described.append(f"The input has to match this {grammar.syntax} grammar:\n{grammar.definition}")
        if grammar.syntax == "regex":
            parameter["pattern"] = f"^(?:{grammar.definition})$"
    return {
        "name": tool.name,
        "description": "\n\n".join(described) or None,
        "parameters": {
            "type": "object",
            "properties": {INPUT: parameter},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }


def arguments_of(text: str) -> str:
    """Return the arguments of the function that stands for a freeform tool, for this input."""
    return msgspec.json.encode({INPUT: text}).decode()


def input_in(arguments: str) -> str:
    """Return the input in arguments. Text that is not such an object is the input itself."""
    return InputReader().feed(arguments)


class InputReader:
    """Reads the input out of arguments that come in pieces. All pieces together give the same input, however they are cut."""

    __slots__ = ("_cut", "_held", "_inside", "_place", "_raw")

    def __init__(self) -> None:
        self._place = 0  # how much of the head was read
        self._held = ""  # what was read before it is known whether this is the head
        self._raw = False
        self._inside = False
        self._cut = ""  # the beginning of an escape

    def feed(self, text: str) -> str:
        """Return the input that this piece adds."""
        if self._place < len(_HEAD) and not self._raw:
            text = self._head(text)
        if self._raw or not self._inside:
            return text if self._raw else ""
        return "".join(self._string(text))

    def _head(self, text: str) -> str:
        """Read the text before the input. Return the rest of the text, or all of it if there is no such head."""
        for at, char in enumerate(text):
            if char == _HEAD[self._place]:
                self._place += 1
            elif char not in _SPACE or self._place not in _SPACE_BEFORE:
                self._raw = True
                return self._held + text[at:]
            self._held += char
            if self._place == len(_HEAD):
                self._inside = True
                return text[at + 1 :]
        return ""

    def _string(self, text: str) -> Iterator[str]:
        text, self._cut, at = self._cut + text, "", 0
        while at < len(text):
            special = _SPECIAL.search(text, at)
            if special is None:
                yield text[at:]
                return
            yield text[at : special.start()]
            at = special.start()
            if text[at] == '"':
                self._inside = False
                return
            length, char = _escape(text, at)
            if not length:
                self._cut = text[at:]
                return
            yield char
            at += length


def _escape(text: str, at: int) -> tuple[int, str]:
    """Return the length of the escape at this place and its character; length 0 if more text is needed."""
    kind = text[at + 1 : at + 2]
    if kind != "u":
        return (2, _ESCAPES.get(kind, kind)) if kind else (0, "")
    digits = text[at + 2 : at + 6]
    if not _HEX.fullmatch(digits):
        return (0, "") if len(digits) < 4 and _HEX.fullmatch(digits.ljust(4, "0")) else (2, _UNPAIRED)
    code = int(digits, 16)
    if not 0xD800 <= code < 0xE000:
        return 6, chr(code)
    following = text[at + 6 : at + 12]
    if code < 0xDC00 and len(following) < 6 and "\\u"[: len(following)] == following[:2]:
        return 0, ""
    digits = following[2:] if following.startswith("\\u") else ""
    low = int(digits, 16) if _HEX.fullmatch(digits) else 0
    if code < 0xDC00 <= low < 0xE000:
        return 12, chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return 6, _UNPAIRED


class FreeformParts:
    """Replaces the arguments of freeform tools by their input, in the parts of one choice."""

    __slots__ = ("_names", "_readers")

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._readers: dict[int, InputReader] = {}

    def took(self, index: int) -> bool:
        """Return whether the call with this index is one of a freeform tool."""
        return index in self._readers

    def convert(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts; pieces of a call that add nothing to its input are left out."""
        return list(self._convert(parts))

    def _convert(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if part.kind != "tool":
                yield part
                continue
            if part.name in self._names:
                self._readers[part.index] = InputReader()
            if (reader := self._readers.get(part.index)) is None:
                yield part
                continue
            text = reader.feed(part.text)
            if text or part.name is not None:
                yield Part("tool", text, part.index, part.id, part.name)
