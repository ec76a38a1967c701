"""The ids of tool calls, and a streamed answer beside the same answer taken apart as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.jobs import Call, OutputParts
from headrace.workers.parsing.interface import reconcile, stable_call_id


@pytest.mark.parametrize(
    "random", [None, "chatcmpl-tool-0123456789abcdef", "call_0123456789abcdef0123", "call_2_0123456789abcdef0123"]
)
def test_random_ids_become_the_same_id_every_time(random: str | None) -> None:
    assert stable_call_id(random, "r", 0, 1) == stable_call_id(None, "r", 0, 1)


@pytest.mark.parametrize("meant", ["functions.get_weather:0", "call_1"])
def test_ids_that_mean_something_stay(meant: str) -> None:
    assert stable_call_id(meant, "r", 0, 1) == meant


def test_an_id_of_nine_characters_keeps_its_length() -> None:
    ids = {stable_call_id("aB3xY9zQ1", "r", choice, index) for choice in range(3) for index in range(3)}
    assert len(ids) == 9
    assert {len(call_id) for call_id in ids} == {9}
    assert stable_call_id("aB3xY9zQ1", "r", 0, 0) == stable_call_id("111111111", "r", 0, 0)


CALL = Call("a", "f", '{"x": 1}')


@pytest.mark.parametrize(
    ("streamed", "whole"),
    [
        (OutputParts("ok", "hm", [CALL]), OutputParts("ok", "hm", [CALL])),
        (OutputParts(" ok\n"), OutputParts("ok")),
        (OutputParts(calls=[Call("a", "f", '{"x":1}')]), OutputParts(calls=[CALL])),
    ],
)
def test_white_space_makes_no_difference(streamed: OutputParts, whole: OutputParts) -> None:
    assert reconcile(streamed, whole) == ("same", [])


@given(
    text=st.text(min_size=1),
    cut=st.integers(min_value=0),
    field=st.sampled_from(["content", "reasoning"]),
)
def test_what_came_late_is_added(text: str, cut: int, field: str) -> None:
    streamed, whole = OutputParts(), OutputParts()
    setattr(streamed, field, text[: cut % len(text)])
    setattr(whole, field, text)
    outcome, parts = reconcile(streamed, whole)
    streamed.add(parts)
    assert reconcile(streamed, whole)[0] == "same"
    assert outcome in ("same", "completed")


def test_the_rest_of_a_call_and_further_calls_are_added() -> None:
    streamed, whole = OutputParts(calls=[Call("a", "f", '{"x"')]), OutputParts(calls=[CALL, Call("b", "g", "{}")])
    outcome, parts = reconcile(streamed, whole)
    streamed.add(parts)
    assert outcome == "completed"
    assert streamed == whole


@pytest.mark.parametrize(
    ("streamed", "whole"),
    [
        (OutputParts("no"), OutputParts("yes")),
        (OutputParts("", "hm"), OutputParts("hm")),
        (OutputParts(calls=[CALL]), OutputParts('<tool_call>{"name": "f"')),
        (OutputParts(calls=[CALL]), OutputParts(calls=[Call("a", "g", '{"x": 1}')])),
        (OutputParts(calls=[CALL]), OutputParts(calls=[Call("a", "f", '{"x": 2}')])),
    ],
)
def test_what_has_been_said_is_not_made_worse(streamed: OutputParts, whole: OutputParts) -> None:
    assert reconcile(streamed, whole) == ("differs", [])
