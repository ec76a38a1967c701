"""Strings drawn from a key: words, strings of a format, and strings that a regular expression matches.

Python's own parser reads a pattern, and a string is built along its tree. Constructs that cannot be satisfied step by step
(looking ahead or behind, back references, atomic groups, word boundaries) are refused. The pattern is never matched here, so
one with catastrophic backtracking does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import shake_128
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, TypeVar

# Python's parser of patterns has no public name.

T = TypeVar("T")

MOST_CHARACTERS = 1 << 16
_PART = 64  # bytes drawn at once
_TRIES = 64
_SPREAD = 6  # an open repetition adds up to this many
_MOST_OF_RANGE = 256  # characters that are looked at in one range of a class


class Unsupported(Exception):
    """The request has a mistake or asks for a feature that the simulator lacks; the message names it."""


class NoInstance(Exception):
    """No value was found that satisfies the schema; another alternative may have one."""


class Draws:
    """A stream of random decisions; the same key gives the same ones. Texts are made of `words`."""

    def __init__(self, key: bytes, words: Sequence[str]) -> None:
        self.words = words
        self._key = key
        self._part = 0
        self._left = b""

    def below(self, end: int) -> int:
        """Draw a number from 0 to `end` - 1; `end` is at least 1."""
        size = (end.bit_length() + 7) // 8 + 1
        while len(self._left) < size:
            self._left += shake_128(self._key + self._part.to_bytes(8, "little")).digest(_PART)
            self._part += 1
        drawn, self._left = self._left[:size], self._left[size:]
        return int.from_bytes(drawn, "little") % end

    def one_in(self, times: int) -> bool:
        """Draw true with a chance of one in so many."""
        return self.below(times) == 0

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def shuffled(self, values: Iterable[T]) -> list[T]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(len(left))]

    def word(self) -> str:
        return self.pick(self.words)


def _date(draws: Draws) -> str:
    return f"20{draws.below(100):02d}-{1 + draws.below(12):02d}-{1 + draws.below(28):02d}"


def _clock(draws: Draws) -> str:
    return f"{draws.below(24):02d}:{draws.below(60):02d}:{draws.below(60):02d}Z"


def _uuid(draws: Draws) -> str:
    digits = f"{draws.below(16**30):030x}"
    return f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:18]}-{digits[18:30]}"


FORMATS: dict[str, Callable[[Draws], str]] = {
    "date": _date,
    "time": _clock,
    "date-time": lambda draws: f"{_date(draws)}T{_clock(draws)}",
    "duration": lambda draws: f"PT{1 + draws.below(59)}M",
    "email": lambda draws: f"{draws.word()}@{draws.word()}.example",
    "hostname": lambda draws: f"{draws.word()}.example",
    "uri": lambda draws: f"https://{draws.word()}.example/{draws.word()}",
    "uuid": _uuid,
    "ipv4": lambda draws: f"192.0.2.{draws.below(256)}",
    "ipv6": lambda draws: f"2001:db8::{1 + draws.below(0xFFFF):x}",
}
"""Formats that JSON schemas name. Other ones are annotations, as in the standard."""

_RARE = ('"', "\\", "\n", "é", "漢字", "🙂")  # characters that an incremental JSON reader must handle


def words(draws: Draws, least: int, most: int) -> str:
    """Draw words, `least` to `most` characters in all; some contain a character that JSON escapes or that has several bytes."""
    wanted = 1 + draws.below(4)
    text = draws.word()
    while wanted > 1 or len(text) < least:
        text += f" {draws.pick(_RARE) if draws.one_in(16) else draws.word()}"
        wanted -= 1
    return text[:most]


_PLAIN = "abcdefghijklmnopqrstuvwxyz0123456789"
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
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
        self._least: int = self._tree.getwidth()[0]
        if self._least > MOST_CHARACTERS:
            raise Unsupported(f"pattern {pattern!r} needs {self._least} characters; the most are {MOST_CHARACTERS}")
        _vet(self._tree, pattern, 1)

    def draw(self, draws: Draws, *, least: int = 0, most: int = MOST_CHARACTERS) -> str:
        """Draw a string that the whole pattern matches, of `least` to `most` characters. Raises NoInstance."""
        for attempt in range(_TRIES):
            budget = None
            if attempt:  # the free draw had the wrong length: aim for a length
                aim = least + draws.below(max(1, min(most, least + _SPREAD) - least + 1))
                budget = max(0, aim - self._least)
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
    ended: bool = False  # an end anchor has been passed

    def add(self, char: str) -> None:
        if self.ended:
            raise NoInstance("text after the end")
        self.length += 1
        if self.length > MOST_CHARACTERS:
            raise NoInstance("too long")
        self.out.append(char)


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
        elif op not in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            name = str(value if op is ops.AT else op).lower()
            raise Unsupported(f"pattern {pattern!r} uses {name}, which the simulator cannot satisfy")


def _write(tree: Any, writing: _StringBuilder) -> None:
    draws = writing.draws
    for op, value in tree:
        if op is ops.BRANCH:
            _write(draws.pick(value[1]), writing)
        elif op is ops.SUBPATTERN:
            _write(value[3], writing)
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            for _ in range(_times(value, writing)):
                _write(value[2], writing)
        elif op is ops.AT:
            if value in _ENDS:
                writing.ended = True
            elif writing.length:
                raise NoInstance("a start in the middle")
        elif op is ops.LITERAL:
            writing.add(chr(value))
        elif op is ops.ANY:
            writing.add(draws.pick(_PLAIN))
        else:
            writing.add(_one_of(value if op is ops.IN else [(ops.NEGATE, None), (ops.LITERAL, value)], draws))


def _times(repeat: Any, writing: _StringBuilder) -> int:
    least, most, what = int(repeat[0]), int(repeat[1]), repeat[2]
    if writing.budget is None:
        return least + writing.draws.below(min(most - least, _SPREAD) + 1)
    width = max(1, int(what.getwidth()[0]))
    more = min(most - least, writing.budget // width)
    writing.budget -= more * width
    return least + more


def _one_of(items: Any, draws: Draws) -> str:
    negated = items[0][0] is ops.NEGATE
    named = items[1:] if negated else items

    def inside(char: str) -> bool:
        return any(_is_in(char, item) for item in named)

    for candidates in (_PLAIN, _PRINTABLE, "\n\t", [] if negated else _named(named), map(chr, range(0xA1, 0x2000))):
        # The pattern may ignore case: a class that leaves out characters does so in both cases.
        allowed = [char for char in candidates if inside(char) is not negated and not (negated and inside(char.swapcase()))]
        if allowed:
            return draws.pick(allowed)
    raise NoInstance("an empty class")


def _named(items: Any) -> Iterator[str]:
    """Iterate over the first characters that the literals and ranges of a class name; none is half a character."""
    for op, value in items:
        if op in (ops.RANGE, ops.LITERAL):
            first, last = value if op is ops.RANGE else (value, value)
            points = range(first, min(last, first + _MOST_OF_RANGE) + 1)
            yield from (chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)


def _is_in(char: str, item: Any) -> bool:
    op, value = item
    if op is ops.LITERAL:
        return ord(char) == int(value)
    if op is ops.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    return _CATEGORIES[value](char)
