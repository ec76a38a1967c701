"""Messages of processes, told apart from answers of the server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.api import SubjectPattern, from_stream
from tests.support.subject_patterns import matches

tokens = st.lists(st.sampled_from(["a", "b", "cc"]), min_size=1, max_size=5).map(".".join)
patterns = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4).flatmap(
    lambda parts: st.sampled_from([".".join(parts), ".".join([*parts, ">"])])
)


@given(pattern=patterns, subject=tokens)
def test_a_pattern_covers_what_a_server_would_deliver(pattern: str, subject: str) -> None:
    assert SubjectPattern(pattern).covers(subject.encode()) == matches(pattern, subject)


def test_a_plain_subject_covers_itself_only() -> None:
    assert SubjectPattern("hr.ctl.w1").covers(b"hr.ctl.w1")
    assert not SubjectPattern("hr.ctl.w1").covers(b"hr.ctl.w1.x")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (b"NATS/1.0\r\nNats-Stream: HR_REQ\r\n\r\n", True),
        (b"NATS/1.0\r\nX: y\r\nnats-subject: a\r\n\r\n", True),
        (b"NATS/1.0\r\nNats-Msg-Id: Nats-Stream\r\n\r\n", False),
        (b"NATS/1.0 503\r\n\r\n", False),
    ],
)
def test_headers_of_a_place_in_a_stream_are_known(headers: bytes, expected: bool) -> None:
    assert from_stream(headers) is expected
