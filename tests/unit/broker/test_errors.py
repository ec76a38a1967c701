"""The text of a missed deadline tells a wait for nothing from an answer that was on its way."""

from __future__ import annotations

import pytest

from headrace.broker.errors import missed, unfinished


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (missed(90.04, 1), "the deadline passed: the request waited 90.0 s in the queue and never started"),
        (missed(90.0, 2), "the deadline passed after 90.0 s: the request had been moved and waited for another worker"),
        (unfinished(2.5, 17), "the deadline passed after 2.5 s: the request had started and produced 17 tokens"),
    ],
)
def test_the_text_says_how_far_the_request_came(text: str, expected: str) -> None:
    assert text == expected
