"""A streamed answer beside the same answer taken apart as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.said import Call, Said
from workers.parsing.settling import settle

CALL = Call("a", "f", '{"x": 1}')


@pytest.mark.parametrize(
    ("streamed", "whole"),
    [
        (Said("ok", "hm", [CALL]), Said("ok", "hm", [CALL])),
        (Said(" ok\n"), Said("ok")),
        (Said(calls=[Call("a", "f", '{"x":1}')]), Said(calls=[CALL])),
    ],
)
def test_white_space_makes_no_difference(streamed: Said, whole: Said) -> None:
    assert settle(streamed, whole) == ("same", [])


@given(
    text=st.text(min_size=1),
    cut=st.integers(min_value=0),
    field=st.sampled_from(["content", "reasoning"]),
)
def test_what_came_late_is_added(text: str, cut: int, field: str) -> None:
    streamed, whole = Said(), Said()
    setattr(streamed, field, text[: cut % len(text)])
    setattr(whole, field, text)
    outcome, parts = settle(streamed, whole)
    streamed.add(parts)
    assert settle(streamed, whole)[0] == "same"
    assert outcome in ("same", "completed")


def test_the_rest_of_a_call_and_further_calls_are_added() -> None:
    streamed, whole = Said(calls=[Call("a", "f", '{"x"')]), Said(calls=[CALL, Call("b", "g", "{}")])
    outcome, parts = settle(streamed, whole)
    streamed.add(parts)
    assert outcome == "completed"
    assert streamed == whole


@pytest.mark.parametrize(
    ("streamed", "whole"),
    [
        (Said("no"), Said("yes")),
        (Said("", "hm"), Said("hm")),
        (Said(calls=[CALL]), Said('<tool_call>{"name": "f"')),
        (Said(calls=[CALL]), Said(calls=[Call("a", "g", '{"x": 1}')])),
        (Said(calls=[CALL]), Said(calls=[Call("a", "f", '{"x": 2}')])),
    ],
)
def test_what_has_been_said_is_not_made_worse(streamed: Said, whole: Said) -> None:
    assert settle(streamed, whole) == ("differs", [])
