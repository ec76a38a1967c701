"""Writes the demo to a terminal or a file: lines, and a text that streams, wrapped between words, with colours where wanted."""

from __future__ import annotations

from enum import Enum
from typing import TextIO

WIDTH = 78  # columns
INDENT = "    "


class Colour(Enum):
    """A colour, as its ANSI code."""

    PLAIN = ""
    DIM = "2"
    BOLD = "1"
    GOOD = "32"
    BAD = "31"
    FIRST = "36"  # the worker that begins
    SECOND = "33"  # the worker that goes on


class Screen:
    """Writes to `stream`. Every write is flushed, because the demo is about time."""

    def __init__(self, stream: TextIO, *, coloured: bool) -> None:
        self._stream = stream
        self._coloured = coloured
        self._column = 0  # in the text that streams; 0 = it stands at the beginning of a line
        self._word = ""  # the end of it that waits for the rest of its word
        self._colour = Colour.PLAIN  # of the text that streams

    def line(self, text: str = "", colour: Colour = Colour.PLAIN) -> None:
        """Write a line, below the text that streams if there is one."""
        self.flush_word()
        end = "\n" if self._column else ""
        self._column = 0
        self._write(f"{end}{self._painted(text, colour)}\n")

    def stream(self, text: str, colour: Colour) -> None:
        """Write the next piece of a text. A word moves to the next line as a whole, so its last one waits for what follows."""
        self._word += text
        self._colour = colour
        while (cut := self._word.find(" ", 1)) > 0:
            word, self._word = self._word[:cut], self._word[cut:]
            self._put(word, colour)

    def flush_word(self) -> None:
        """Write the word that waits: nothing follows for now."""
        word, self._word = self._word, ""
        if word:
            self._put(word, self._colour)

    def _put(self, word: str, colour: Colour) -> None:
        if self._column + len(word) > WIDTH:
            self._write("\n")
            self._column = 0
        if not self._column:
            word = word.lstrip(" ")
            self._write(INDENT)
            self._column = len(INDENT)
        self._column += len(word)
        self._write(self._painted(word, colour))

    def _painted(self, text: str, colour: Colour) -> str:
        return f"\x1b[{colour.value}m{text}\x1b[0m" if self._coloured and colour.value and text else text

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
