"""Texts of the simulator match their pattern, of any length that the pattern allows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.errors import RequestInvalid
from tests.unit.workers.sim.guided_bench import KEYS, text, valid

PATTERNS = [
    r"yes|no",
    r"\d{3}-\d{4}",
    r"^[A-Z][a-z]{2,8}( [A-Z]\w*)?$",
    r"[^a-z\s]{5}",
    r"(?i)[^a-y]+",
    r"\W\D\S.",
    r"(a|bc){2,}?x*",
    r"(https?)://[a-z]+\.(com|org)(/\w+)*",
    r"[\u4e00-\u9fff]{2}é",
    r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?",
    r"(^a|b)c$",
    r"\{\"a\": \d\}",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_their_pattern(pattern):
    for key in KEYS:
        assert re.fullmatch(pattern, text({"regex": pattern}, key))


@given(st.integers(0, 40), st.integers(0, 40), st.binary(max_size=3))
def test_a_pattern_with_open_repetitions_reaches_any_length(one, other, key):
    least, most = sorted((one, other))
    valid({"type": "string", "pattern": "^[a-z]+[0-9]*$" if most else "^[0-9]*$", "minLength": least, "maxLength": most}, key)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)a", "assert"),
        (r"(a|b)\1", "groupref"),
        ("(?<!a)b", "assert_not"),
        (r"\bword\b", "at_boundary"),
        ("(?>a)", "atomic_group"),
        ("a++b", "possessive_repeat"),
        (r"\p{L}", "bad escape"),
        ("(", "missing"),
        ("a{100000}", "the most are"),
        ("(?:){60000}" * 2 + "(?:(?:){60000}){60000}", "repeats something"),
        ("a^b", "no string"),
        ("a$b", "no string"),
        (7, "must be a text"),
    ],
)
def test_patterns_beyond_it_are_refused_by_name(pattern, message):
    with pytest.raises(RequestInvalid, match=message) as caught:
        text({"regex": pattern})
    assert caught.value.param == "regex"
