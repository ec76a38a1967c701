"""Structural tags are followed by the simulator, in both notations, or refused by name."""

from __future__ import annotations

import json
import re

import pytest

from headrace.workers.errors import RequestInvalid
from tests.unit.workers.sim.guided_bench import KEYS, text

CALL = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "f", "arguments": ',
    "content": {
        "type": "json_schema",
        "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
    "end": ["}\n</tool_call>"],
}
ONE_CALL = r'<tool_call>\n\{"name": "f", "arguments": \{"x": -?\d+\}\}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}, rf"([^<]*({ONE_CALL})?)*"),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<tool_call>"],
                "tags": [CALL],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ONE_CALL,
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "A"},
                    {"type": "regex", "pattern": "[0-9]"},
                    {"type": "any_text"},
                ],
            },
            r"A[0-9](?s:.*)",
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_structural_tags_are_followed(form, pattern):
    given = {"type": "structural_tag", "format": form}
    for key in KEYS:
        assert re.fullmatch(pattern, text({"structural_tag": json.dumps(given)}, key))
    assert text({"structural_tag": given}) == text({"structural_tag": json.dumps(given)})


def test_the_older_notation_of_structural_tags_is_read_too():
    given = {"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f"]}
    said = {text({"structural_tag": given}, key) for key in KEYS}
    assert any("<f>1</f>" in one for one in said)
    assert all(re.fullmatch(r"([^<]|<f>1</f>)*", one) for one in said)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "grammar", "grammar": ""}, "does not know the format 'grammar'"),
        ({"type": "json_schema", "style": "qwen_xml", "json_schema": {}}, "style 'qwen_xml'"),
        ({"type": "tag", "begin": "a", "content": {"type": "any_text"}}, "needs the field 'end'"),
        (
            {"type": "tag", "begin": {"type": "token", "token": 1}, "content": {"type": "any_text"}, "end": ""},
            "not with tokens",
        ),
        ({"type": "star", "content": {"type": "any_text"}}, "does not know the format 'star'"),
        ({"type": "triggered_tags", "triggers": [], "tags": []}, "tags is empty"),
        ({"type": "regex", "pattern": 1}, "wrong type"),
        (None, "needs the field 'type'"),
    ],
)
def test_structural_tags_beyond_it_are_refused_by_name(form, message):
    with pytest.raises(RequestInvalid, match=message) as caught:
        text({"structural_tag": {"type": "structural_tag", "format": form}})
    assert caught.value.param == "structural_tag"
