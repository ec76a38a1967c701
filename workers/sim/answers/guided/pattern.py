"""Strings that a regular expression matches.

Python's own parser reads the pattern, and a string is built along its tree. Constructs that cannot be satisfied step by step
(looking ahead or behind, atomic groups, word boundaries) are refused. The pattern is never matched here, so a pattern with
catastrophic backtracking does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

# Python's parser of patterns has no public name.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from headrace.workers.sim.answers.guided.draws import Draws
from headrace.workers.sim.answers.guided.errors import NoInstance, Unsupported

MOST_CHARACTERS = 1 << 16
_TRIES = 64
_SPREAD = 6  # an open repetition adds up to this many

_DIGITS = "0123456789"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = _LETTERS + _LETTERS.upper() + _DIGITS + "_"
_PLAIN = _LETTERS + _DIGITS
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
_CLASSES: dict[Any, str] = {
    ops.CATEGORY_DIGIT: _DIGITS,
    ops.CATEGORY_WORD: _WORD,
    ops.CATEGORY_SPACE: " ",
    ops.CATEGORY_NOT_DIGIT: _LETTERS,
    ops.CATEGORY_NOT_WORD: " -.,",
    ops.CATEGORY_NOT_SPACE: _PLAIN,
}
_INSIDE: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: str.isdigit,
    ops.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_DIGIT: lambda char: not char.isdigit(),
    ops.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
    ops.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
}
_STARTS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)


class Pattern:
    """A parsed pattern. Raises Unsupported when the text is not a pattern or uses a construct that is not supported."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        try:
            self._tree = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise Unsupported(f"pattern {pattern!r}: {error}") from None
        self.least: int = self._tree.getwidth()[0]
        if self.least > MOST_CHARACTERS:
            raise Unsupported(f"pattern {pattern!r} needs {self.least} characters; the most are {MOST_CHARACTERS}")
        _vet(self._tree, pattern, 1)

    def draw(self, draws: Draws, *, least: int = 0, most: int = MOST_CHARACTERS) -> str:
        """Draw a string that the whole pattern matches, of `least` to `most` characters. Raises NoInstance."""
        for attempt in range(_TRIES):
            budget = None
            if attempt:  # the free draw had the wrong length: aim for a length
                aim = least + draws.below(max(1, min(most, least + _SPREAD) - least + 1))
                budget = max(0, aim - self.least)
            writing = _StringBuilder(draws, budget)
            try:
                _write(self._tree, writing)
            except NoInstance:
                continue
            if least <= writing.length <= most:
                return "".join(writing.out)
        raise NoInstance(f"no string of {least} to {most} characters was found for pattern {self._pattern!r}")


@dataclass(slots=True)
class _StringBuilder:
    """A string under construction. `budget`: characters that open repetitions are to add in all; None = no target length."""

    draws: Draws
    budget: int | None
    out: list[str] = field(default_factory=list)
    length: int = 0
    groups: dict[int, str] = field(default_factory=dict)
    ended: bool = False  # an end anchor has been passed

    def add(self, text: str) -> None:
        if self.ended and text:
            raise NoInstance("text after the end")
        self.length += len(text)
        if self.length > MOST_CHARACTERS:
            raise NoInstance("too long")
        self.out.append(text)


def _vet(tree: Any, pattern: str, times: int) -> None:
    if times > MOST_CHARACTERS:
        raise Unsupported(f"pattern {pattern!r} repeats something {times} times; the most are {MOST_CHARACTERS}")
    for op, value in tree:
        if op is ops.SUBPATTERN:
            _vet(value[3], pattern, times)
        elif op is ops.BRANCH:
            for branch in value[1]:
                _vet(branch, pattern, times)
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            _vet(value[2], pattern, times * max(1, int(value[0])))
        elif op is ops.AT and value in (*_STARTS, *_ENDS):
            pass
        elif op not in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.GROUPREF):
            name = str(value if op is ops.AT else op).lower()
            raise Unsupported(f"pattern {pattern!r} uses {name}, which the simulator cannot satisfy")


def _write(tree: Any, writing: _StringBuilder) -> None:
    for op, value in tree:
        if op is ops.BRANCH:
            _write(writing.draws.pick(value[1]), writing)
        elif op is ops.SUBPATTERN:
            start = len(writing.out)
            _write(value[3], writing)
            if value[0] is not None:
                writing.groups[value[0]] = "".join(writing.out[start:])
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            for _ in range(_times(value, writing)):
                _write(value[2], writing)
        elif op is ops.AT:
            if value in _ENDS:
                writing.ended = True
            elif writing.length:
                raise NoInstance("a start in the middle")
        else:
            writing.add(_text(op, value, writing))


def _text(op: Any, value: Any, writing: _StringBuilder) -> str:
    """Return the text of one element: a character, or a group again."""
    if op is ops.LITERAL:
        return chr(value)
    if op is ops.ANY:
        return writing.draws.pick(_PLAIN)
    if op is ops.NOT_LITERAL:
        return _one_of([(ops.NEGATE, None), (ops.LITERAL, value)], writing.draws)
    if op is ops.IN:
        return _one_of(value, writing.draws)
    if value not in writing.groups:
        raise NoInstance("a group that was not written")
    return writing.groups[value]


def _times(repeat: Any, writing: _StringBuilder) -> int:
    least, most, what = int(repeat[0]), int(repeat[1]), repeat[2]
    if writing.budget is None:
        return least + writing.draws.below(min(most - least, _SPREAD) + 1)
    width = max(1, int(what.getwidth()[0]))
    more = min(most - least, writing.budget // width)
    writing.budget -= more * width
    return least + more


def _one_of(items: Any, draws: Draws) -> str:
    """Draw a character of a class, ASCII where there is one."""
    if items[0][0] is not ops.NEGATE:
        op, value = draws.pick(items)
        if op is ops.RANGE:
            return _between(value[0], value[1], draws)
        return chr(value) if op is ops.LITERAL else draws.pick(_CLASSES[value])
    for candidates in (_PLAIN, _PRINTABLE, "\n\t", map(chr, range(0xA1, 0x2000))):
        allowed = [
            char for char in candidates if not any(_is_in(form, item) for item in items[1:] for form in _both_cases(char))
        ]
        if allowed:
            return draws.pick(allowed)
    raise NoInstance("an empty class")


def _between(first: int, last: int, draws: Draws) -> str:
    """Draw a printable ASCII character of this range if it has any, and no surrogate."""
    low, high = max(first, 0x20), min(last, 0x7E)
    if low > high:
        low, high = first, last
    point = low + draws.below(high - low + 1)
    if 0xD800 <= point <= 0xDFFF:
        raise NoInstance("half a character")
    return chr(point)


def _both_cases(char: str) -> tuple[str, str]:
    """Return a character in both cases, because the pattern may ignore them."""
    return char, char.swapcase()


def _is_in(char: str, item: Any) -> bool:
    op, value = item
    if op is ops.LITERAL:
        return ord(char) == int(value)
    if op is ops.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    return _INSIDE[value](char)
