"""JSON of the simulator satisfies its schema, and schemas that it cannot follow are refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from tests.unit.workers.sim.guided_bench import KEYS, text, valid


def bounded(low: str, high: str, most: int) -> st.SearchStrategy[dict[str, int]]:
    pairs = st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)
    both = pairs.map(lambda pair: {low: pair[0], high: pair[1]})
    return st.one_of(st.just({}), both, both.map(lambda b: {low: b[low]}), both.map(lambda b: {high: b[high]}))


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda all_: {name: value for part in all_ for name, value in part.items()})


numbers = st.one_of(st.integers(-(10**12), 10**12), st.floats(-1e6, 1e6).map(lambda x: round(x, 3)))
ranges = st.tuples(numbers, st.integers(3, 10**6)).map(lambda pair: {"minimum": pair[0], "exclusiveMaximum": pair[0] + pair[1]})
ends = st.one_of(st.just({}), ranges, numbers.map(lambda x: {"exclusiveMinimum": x}), numbers.map(lambda x: {"maximum": x}))
scalars = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=5), st.just(1.5))
values = st.recursive(
    scalars, lambda v: st.one_of(st.lists(v, max_size=2), st.dictionaries(st.text(max_size=3), v, max_size=2))
)
names = st.sampled_from(["a", "b", "name", "größe", "with space", '"quoted"'])

leaves = st.one_of(
    st.just({}),
    st.just(True),
    merged(st.just({"type": "string"}), bounded("minLength", "maxLength", 40)),
    st.sampled_from(["date", "date-time", "email", "uuid", "ipv4", "uri", "unheard-of"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.sampled_from([r"^[a-z]{2,4}-\d+$", r"x|yy", r"^(?:ab?)+c*$"]).map(lambda p: {"type": "string", "pattern": p}),
    merged(st.sampled_from([{"type": "integer"}, {"type": "number"}]), ends),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
    st.lists(values, min_size=1, max_size=4).map(lambda v: {"enum": v}),
    values.map(lambda v: {"const": v}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = merged(st.just({"type": "array"}), bounded("minItems", "maxItems", 4), inner.map(lambda s: {"items": s}))
    tuples = st.lists(inner, min_size=1, max_size=3).map(lambda s: {"type": "array", "prefixItems": s, "items": False})
    objects = st.dictionaries(names, inner, max_size=4).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(names, unique=True, max_size=3),
            },
            optional={"title": st.text(max_size=3)},
        )
    )
    closed = st.dictionaries(names, inner, min_size=1, max_size=4).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:2],
            "additionalProperties": False,
        }
    )
    maps = inner.map(lambda s: {"type": "object", "additionalProperties": s})
    either = st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})
    return st.one_of(arrays, tuples, objects, closed, maps, either)


schemas = st.recursive(leaves, containers, max_leaves=8)


@settings(max_examples=100)
@given(schemas, st.binary(max_size=4))
def test_values_satisfy_their_schema(schema, key):
    valid(schema, key)


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "left", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
TOOLS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "anyOf": [
            {
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
            for name, parameters in {
                "weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
                "stop": {"type": "object", "properties": {}},
            }.items()
        ],
    },
}
HARDER = {
    "tree": TREE,
    "tools": TOOLS,
    "list of itself": {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, {"type": "integer"}]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 4}, "b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "one of, by a constant": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "null"}}, "required": ["kind"]}
            for kind in ("cat", "dog")
        ]
    },
    "one of, by type": {"oneOf": [{"type": "string"}, {"type": "number", "minimum": 1}, {"enum": [None, True]}]},
    "unique": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 4}, "uniqueItems": True, "minItems": 4},
    "unique beside equal numbers": {"type": "array", "items": {"enum": [1, 1.0, True]}, "uniqueItems": True, "minItems": 2},
    "exact pattern length": {"type": "string", "pattern": "^[a-z0-9_]+$", "minLength": 23, "maxLength": 23},
    "narrow range": {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.2},
    "one number": {"type": "number", "minimum": 0.3, "maximum": 0.3},
    "large": {"type": "integer", "minimum": 2**70},
    "escaped reference": {"$defs": {"a/b~c d": {"const": 1}}, "$ref": "#/$defs/a~1b~0c%20d"},
    "no type named": {"minimum": 4, "maximum": 5},
}


@pytest.mark.parametrize("name", HARDER)
def test_values_satisfy_harder_schemas(name):
    for key in KEYS:
        valid(HARDER[name], key)


def test_a_keyword_decides_the_type_where_none_is_named():
    assert all(isinstance(valid(HARDER["no type named"], key), (int, float)) for key in KEYS)


def test_alternatives_and_optional_properties_all_come_at_some_time():
    kinds = {type(valid({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array"}]}, key)) for key in KEYS}
    assert kinds == {str, int, list}
    optional = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    assert {tuple(valid(optional, key)) for key in KEYS} == {("a", "b"), ("a",), ("b",), ()}
    assert {json.loads(text({"json": TOOLS}, key))[0]["name"] for key in KEYS} == {"weather", "stop"}


def test_properties_come_in_the_order_of_the_schema():
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in "zyxabc"}, "required": list("abcxyz")}
    assert list(valid(schema, b"1")) == list("zyxabc")


def test_a_schema_may_come_as_json_text():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert text({"json": json.dumps(schema)}) == text({"json": schema})


def test_strings_have_what_readers_of_json_must_get_right():
    said = "".join(text({"json": {"type": "array", "items": {"type": "string"}, "minItems": 40}}, key) for key in KEYS)
    assert all(hard in said for hard in ('\\"', "\\\\", "\\n", "é", "🙂"))


REFUSED = {
    "contains": ({"type": "array", "contains": {}}, r"\$\.contains: .*'contains'"),
    "deep inside": ({"properties": {"a": {"items": {"if": {}}}}}, r"\$\.properties\.a\.items\.if"),
    "draft 4": ({"exclusiveMinimum": True}, "exclusiveMinimum=True must be a number"),
    "a list of item schemas": ({"items": [{}]}, r"\$\.items must be a schema"),
    "type": ({"type": "text"}, "type='text' must be of string, "),
    "count": ({"minLength": -1}, "minLength=-1"),
    "step": ({"properties": {"a": {"multipleOf": 2}}}, r"\$\.properties\.a\.multipleOf: .*cannot follow"),
    "not": ({"not": {}}, r"\$\.not: .*cannot follow the keyword 'not'"),
    "names": ({"propertyNames": {}}, "propertyNames"),
    "one of, overlapping": ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf whose alternatives overlap"),
    "words beside an enum": ({"enum": ["a", "bb"], "minLength": 2}, "'minLength' beside enum or const"),
    "two patterns": ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "'pattern' twice"),
    "closed apart": (
        {"allOf": [{"additionalProperties": False}, {"properties": {"a": {}}}]},
        "additionalProperties apart from the properties",
    ),
    "infinite": ({"minimum": float("inf")}, "minimum=inf"),
    "reference away": ({"$ref": "https://example.org/x"}, "points outside"),
    "reference to nothing": ({"$ref": "#/$defs/x"}, "points at nothing"),
    "reference to no schema": ({"$defs": {}, "title": "x", "$ref": "#/title"}, "is not a schema"),
    "only itself": ({"$ref": "#"}, "no value"),
    "endless": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value of at most"),
    "false": (False, "no value"),
    "contradiction": ({"type": "integer", "minimum": 3, "maximum": 2}, "no number lies within"),
    "two types": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value"),
    "no such item": ({"type": "array", "minItems": 2, "prefixItems": [{}], "items": False}, "no value"),
    "too few": ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3}, "no more different"),
    "bad pattern": ({"type": "string", "pattern": "("}, "pattern"),
    "too many": ({"type": "array", "minItems": 10**6}, "more than 5000 values"),
    "a crowd": ({"allOf": [{"anyOf": [{"const": n} for n in range(30)]}] * 2}, "combinations"),
    "not json": ("{", "not JSON"),
    "not a schema": (["a"], "must be a schema"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schemas_that_it_cannot_follow_are_refused_by_name(case):
    schema, message = REFUSED[case]
    with pytest.raises(RequestInvalid, match=message) as caught:
        text({"json": schema})
    assert caught.value.param == "json"


def test_a_schema_of_many_levels_is_refused_and_not_a_crash():
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestInvalid, match="nested too deeply"):
        text({"json": deep})
    while deep:  # or the destructor recurses
        deep = deep.pop("items")


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
