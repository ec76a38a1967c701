"""Trace contexts are read as the recommendation says, and what is not well-formed begins a new trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.tracing.context import MOST_STATE, TraceContext, new_context, new_span_id, read_context

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def read(parent: str, *states: str) -> TraceContext | None:
    return read_context([(b"traceparent", parent.encode()), *((b"tracestate", state.encode()) for state in states)])


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans(), st.from_regex(r"\A(a=[a-z]{1,9}(,b=1)?)?\Z"))
def test_a_context_that_was_written_is_read_again(trace: int, span: int, sampled: bool, state: str) -> None:
    headers = TraceContext(trace, 1, sampled, state).headers(span)
    assert read_context([(name.encode(), value.encode()) for name, value in headers.items()]) == TraceContext(
        trace, span, sampled, state
    )


@given(st.binary(max_size=80))
def test_any_header_is_read_without_an_error(value: bytes) -> None:
    assert read_context([(b"traceparent", value)]) is None


@pytest.mark.parametrize(
    "bad",
    [
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_a_context_that_is_not_well_formed_is_ignored(bad: str) -> None:
    assert read(bad) is None


def test_a_later_version_may_have_more_behind_it() -> None:
    found = read(f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like")
    assert found is not None
    assert (found.trace, found.span, found.sampled) == (int(TRACE, 16), int(SPAN, 16), True)


def test_two_parents_are_none() -> None:
    parent = (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())
    assert read_context([parent, parent]) is None


def test_states_are_joined_and_one_that_is_too_long_is_dropped() -> None:
    parent = f"00-{TRACE}-{SPAN}-00"
    joined, dropped, unprintable = read(parent, "a=1", "b=2"), read(parent, "a=" + "x" * MOST_STATE), read(parent, "a=\x01")
    assert joined is not None
    assert dropped is not None
    assert unprintable is not None
    assert (joined.state, dropped.state, unprintable.state) == ("a=1,b=2", "", "")
    assert not joined.sampled


def test_none_all_and_about_a_share_of_new_traces_are_sampled() -> None:
    assert not any(new_context(0.0).sampled for _ in range(100))
    assert all(new_context(1.0).sampled for _ in range(100))
    assert 300 < sum(new_context(0.5).sampled for _ in range(1000)) < 700  # twelve standard deviations
    assert len({new_span_id() for _ in range(100)}) == 100
