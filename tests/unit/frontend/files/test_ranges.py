"""Ranges of a body."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.files.ranges import RangeUnsatisfiable, Span, span_of


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-4", Span(0, 5, 10)),
        ("bytes=3-", Span(3, 7, 10)),
        ("bytes=-4", Span(6, 4, 10)),
        ("bytes=-40", Span(0, 10, 10)),
        ("Bytes = 2 - 99", Span(2, 8, 10)),
        ("bytes=0-0,5-6", None),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("lines=1-2", None),
        ("", None),
        (None, None),
    ],
)
def test_one_range_is_understood_and_anything_else_is_the_whole(header: str | None, span: Span | None) -> None:
    assert span_of(header, 10) == span


@pytest.mark.parametrize(
    ("header", "total"), [("bytes=10-", 10), ("bytes=10-12", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-1", 0)]
)
def test_a_range_behind_the_end_is_an_error(header: str, total: int) -> None:
    with pytest.raises(RangeUnsatisfiable):
        span_of(header, total)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 50))
def test_a_span_is_what_the_header_says(first: int, last: int, total: int) -> None:
    data = bytes(range(total))
    if first >= total:
        return
    span = span_of(f"bytes={first}-{last}", total)
    if last < first:
        assert span is None
        return
    assert span is not None
    assert data[span.offset : span.offset + span.length] == data[first : last + 1]
    assert span.header == f"bytes {first}-{min(last, total - 1)}/{total}"
