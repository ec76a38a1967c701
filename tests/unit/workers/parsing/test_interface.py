"""The ids of tool calls."""

from __future__ import annotations

import pytest

from headrace.workers.parsing.interface import stable_call_id


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
