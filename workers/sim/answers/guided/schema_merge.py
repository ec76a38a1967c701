"""Merging of two flat schemas into one that requires both."""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from headrace.workers.sim.answers.guided.errors import Unsupported
from headrace.workers.sim.answers.guided.flat import Flat, Schema, json_equal


def merge(a: Flat, b: Flat) -> Flat | None:
    """Merge two flat schemas. Returns None when it is plain that no value satisfies both."""
    types = a.types & b.types
    values = a.values
    if b.values is not None:
        allowed = b.values
        values = allowed if values is None else tuple(v for v in values if any(json_equal(v, other) for other in allowed))
    if not types or values == ():
        return None
    low, low_open = _tighter(a.low, a.low_open, b.low, b.low_open, max)
    high, high_open = _tighter(a.high, a.high_open, b.high, b.high_open, min)
    longest = max(len(a.first), len(b.first))
    return Flat(
        types=types,
        hints=a.hints | b.hints,
        values=values,
        low=low,
        low_open=low_open,
        high=high,
        high_open=high_open,
        multiple=_common_multiple(a.multiple, b.multiple),
        min_length=max(a.min_length, b.min_length),
        max_length=_least(a.max_length, b.max_length),
        patterns=tuple(dict.fromkeys((*a.patterns, *b.patterns))),
        format=a.format or b.format,
        names=all_of(a.names, b.names),
        required=tuple(dict.fromkeys((*a.required, *b.required))),
        min_properties=max(a.min_properties, b.min_properties),
        max_properties=_least(a.max_properties, b.max_properties),
        first=tuple(all_of(_item(a, n), _item(b, n)) for n in range(longest)),
        items=all_of(a.items, b.items),
        min_items=max(a.min_items, b.min_items),
        max_items=_least(a.max_items, b.max_items),
        unique=a.unique or b.unique,
        none=(*a.none, *b.none),
        **_properties(a, b),
    )


def _properties(a: Flat, b: Flat) -> dict[str, Any]:
    """Merge the property keywords. `additionalProperties` applies to names that its own schema does not declare, so each side
    also restricts the names of the other.
    """
    if (a.by_pattern and b.others is not True) or (b.by_pattern and a.others is not True):
        raise Unsupported("patternProperties and additionalProperties in different parts of one allOf")
    names = dict.fromkeys((*(a.properties or ()), *(b.properties or ())))
    return {
        "properties": {name: all_of(_property(a, name), _property(b, name)) for name in names} or None,
        "by_pattern": (*a.by_pattern, *b.by_pattern),
        "others": all_of(a.others, b.others),
    }


def _property(flat: Flat, name: str) -> Schema:
    if flat.properties and name in flat.properties:
        return flat.properties[name]
    return True if matching(flat, name) else flat.others


def matching(flat: Flat, name: str) -> list[Schema]:
    """Return the schemas of the patterns that match this name."""
    return [schema for pattern, schema in flat.by_pattern if re.search(pattern, name)]


def property_schema(flat: Flat, name: str) -> Schema:
    """Return the schema for a property of this name."""
    schema = _property(flat, name)
    for more in matching(flat, name):
        schema = all_of(schema, more)
    return schema


def _item(flat: Flat, number: int) -> Schema:
    return flat.first[number] if number < len(flat.first) else flat.items


def all_of(a: Schema, b: Schema) -> Schema:
    """Return a schema that requires both."""
    if a is True or a is b:
        return b
    if b is True:
        return a
    return False if a is False or b is False else {"allOf": [a, b]}


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _tighter(a: Fraction | None, a_open: bool, b: Fraction | None, b_open: bool, pick: Any) -> tuple[Fraction | None, bool]:
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if pick(a, b) == a else (b, b_open)


def _common_multiple(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None:
        return a or b
    return Fraction(lcm(a.numerator, b.numerator), gcd(a.denominator, b.denominator))
