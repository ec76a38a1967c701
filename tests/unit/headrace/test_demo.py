"""The demo's text: wrapped between words, however it is cut into pieces."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.chat import Answer
from headrace.demo import INDENT, WIDTH, Colour, Death, Screen, judge

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


DEATH = Death(worker="worker-1", pid=7, seen=3)
WORKERS = ("worker-1-ab", "worker-2-cd")


def answer(*arrived_s: float) -> Answer:
    pieces = [f" w{n}" for n in range(len(arrived_s))]
    return Answer(pieces=pieces, arrived_s=list(arrived_s), tokens=len(pieces), finish_reason="stop")


PAUSED = answer(0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2)  # the fourth piece was on its way when the worker was killed
CALM = answer(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def test_the_pause_is_the_longest_wait_behind_the_death() -> None:
    verdict = judge(PAUSED, CALM, DEATH, workers=WORKERS)
    assert (verdict.before, verdict.after, verdict.problems) == (4, 3, ())
    assert verdict.pause_s == pytest.approx(0.7)
    assert verdict.usual_s == pytest.approx(0.1)


def test_a_wait_long_before_the_death_is_not_the_pause() -> None:
    early = answer(0.0, 5.0, 5.1, 5.2, 5.9, 6.0, 6.1)
    assert judge(early, CALM, DEATH, workers=WORKERS).before == 4


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"pieces": [" w0", " w1", " w1", " w2", " w3", " w4", " w5"]}, "differ from character 8 on: '1 w2"),
        ({"pieces": [*PAUSED.pieces, " more"]}, "differ from character 21 on: ' more' in place of ''"),
        ({"tokens": 9}, "tokens is 9 in place of 7"),
        ({"finish_reason": "length"}, "finish_reason is length in place of stop"),
    ],
)
def test_every_difference_is_a_problem(changed: dict[str, object], says: str) -> None:
    (problem,) = judge(replace(PAUSED, **changed), CALM, DEATH, workers=WORKERS).problems  # type: ignore[arg-type]
    assert says in problem


@pytest.mark.parametrize("workers", [(), ("worker-1-ab",), ("worker-2-cd", "worker-1-ab")])
def test_it_must_have_been_the_killed_worker_s_and_then_another_one_s(workers: tuple[str, ...]) -> None:
    (problem,) = judge(PAUSED, CALM, DEATH, workers=workers).problems
    assert "worker-1 was killed" in problem
