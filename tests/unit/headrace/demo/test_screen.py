"""The demo's text: wrapped between words, however it is cut into pieces."""

from __future__ import annotations

import io
import re

from hypothesis import given
from hypothesis import strategies as st

from headrace.demo.screen import INDENT, WIDTH, Colour, Screen

WORDS = st.lists(st.text("abc.,", min_size=1, max_size=12), min_size=1, max_size=80)


def shown(pieces: list[str], *, coloured: bool = False) -> str:
    stream = io.StringIO()
    screen = Screen(stream, coloured=coloured)
    for piece in pieces:
        screen.stream(piece, Colour.FIRST)
    screen.line("end", Colour.BAD)
    return stream.getvalue()


@given(WORDS, st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_no_word_is_lost_or_broken_and_no_line_is_too_long(words: list[str], lengths: list[int]) -> None:
    text, pieces = " ".join(words), []
    while text:
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(text[:length])
        text = text[length:]
    *lines, end, rest = shown(pieces).split("\n")
    assert (end, rest) == ("end", "")
    assert all(line.startswith(INDENT) and len(line) <= WIDTH for line in lines)
    assert " ".join(lines).split() == words


def test_a_line_stands_below_the_text_and_the_text_goes_on_below_it() -> None:
    stream = io.StringIO()
    screen = Screen(stream, coloured=False)
    screen.stream("one two", Colour.FIRST)
    screen.line("  what happened", Colour.BAD)
    screen.stream(" three", Colour.SECOND)
    screen.line()
    assert stream.getvalue() == f"{INDENT}one two\n  what happened\n{INDENT}three\n\n"


def test_colours_are_for_terminals_only_and_change_no_character() -> None:
    plain, coloured = shown(["one two"]), shown(["one two"], coloured=True)
    assert "\x1b" not in plain
    assert coloured != plain
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain
    assert coloured.splitlines()[0].count(f"\x1b[{Colour.FIRST.value}m") == 2  # the last word too, though a line came behind it
