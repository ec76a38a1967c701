"""The output of a part is cut into the same lines, however it arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.up.process import Lines

TEXTS = st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=12), max_size=6)


def cut(data: bytes, sizes: list[int], **options: int) -> list[str]:
    lines, found, at = Lines(**options), [], 0
    for size in sizes:
        found += lines.feed(data[at : at + size])
        at += size
    return [*found, *lines.feed(data[at:]), *lines.end()]


@given(TEXTS, st.lists(st.integers(1, 9), max_size=20))
def test_lines_do_not_depend_on_how_their_bytes_arrive(texts: list[str], sizes: list[int]) -> None:
    expected = [last for text in texts if (last := text.rstrip().rpartition("\r")[2])]
    assert cut("\n".join(texts).encode(), sizes) == expected


def test_bytes_that_are_no_text_are_shown_as_such_and_end_nothing() -> None:
    assert cut(b"a\xffb\nnext", []) == ["a\ufffdb", "next"]


def test_a_line_that_is_too_long_is_dropped_as_a_whole_and_the_next_one_is_not() -> None:
    sizes = [4] * 10
    assert cut(b"one\n" + b"x" * 20 + b"\ntwo\nthree", sizes, longest=8) == ["one", "two", "three"]
    assert cut(b"x" * 20, sizes, longest=8) == []
