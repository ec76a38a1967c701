"""Choices and JSON objects of the simulator, and options that it takes or refuses."""

from __future__ import annotations

import json
import re

import pytest

from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from tests.unit.workers.sim.answers.guided.guided_bench import KEYS, text


def test_a_choice_is_one_of_those_given_and_each_comes_at_some_time():
    assert {text({"choice": ["a", "bc", "d"]}, key) for key in KEYS} == {"a", "bc", "d"}
    for wrong in ([], "ab", [1], {"a": 1}):
        with pytest.raises(RequestInvalid, match="list of texts"):
            text({"choice": wrong})


def test_a_json_object_is_one_and_not_empty():
    for key in KEYS:
        value = json.loads(text({"json_object": True}, key))
        assert isinstance(value, dict)
        assert value


def test_options_that_hold_anyway_are_fine_and_others_are_not():
    assert re.fullmatch(r'\{"a": \[1, 2\]\}', text({"json": {"const": {"a": [1, 2]}}, "disable_any_whitespace": True}))
    assert text({"choice": ["a"], "whitespace_pattern": None, "disable_additional_properties": False}) == "a"
    with pytest.raises(UnsupportedByEngine, match="whitespace_pattern"):
        text({"json": {}, "whitespace_pattern": " "})


def test_other_kinds_or_several_or_none_are_refused():
    with pytest.raises(
        UnsupportedByEngine, match="'grammar'; it has json, json_object, choice, regex, structural_tag"
    ) as caught:
        text({"grammar": "root ::= x"})
    assert caught.value.param == "grammar"
    for guided in ({"choice": ["a"], "regex": "a"}, {"choice": None}):
        with pytest.raises(RequestInvalid, match="of one kind"):
            text(guided)
