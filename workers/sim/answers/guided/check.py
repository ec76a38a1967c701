"""The check whether a value satisfies a schema, used where drawing alone cannot tell: for `enum`, `oneOf` and `not`.

Formats are annotations, as in the standard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.workers.sim.answers.guided.flat import Flat, Schema, as_fraction, canonical, json_equal
from headrace.workers.sim.answers.guided.schema import Document
from headrace.workers.sim.answers.guided.schema_merge import property_schema


def satisfies(value: Any, schema: Schema, document: Document) -> bool:
    """Check a value against the alternatives of a schema; one of them is enough."""
    return any(fits(value, flat, document) for flat in document.flats(schema))


def fits(value: Any, flat: Flat, document: Document) -> bool:
    """Check a value against a flat schema."""
    if type_of(value) not in flat.types:
        return False
    if flat.values is not None and not any(json_equal(value, other) for other in flat.values):
        return False
    if isinstance(value, str):
        ok = _fits_string(value, flat)
    elif isinstance(value, Mapping):
        ok = _fits_object(value, flat, document)
    elif isinstance(value, list):
        ok = _fits_array(value, flat, document)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        ok = fits_number(value, flat)
    else:
        ok = True
    return ok and not any(satisfies(value, schema, document) for schema in flat.none)


def type_of(value: Any) -> str:
    """Return the narrowest JSON type of a value: `integer` for 1.0 too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def fits_number(value: float, flat: Flat) -> bool:
    """Check a number. Bounds are compared, and multiples divided, as floats, because JSON readers do the same."""
    if flat.low is not None and (value <= flat.low if flat.low_open else value < float(flat.low)):
        return False
    if flat.high is not None and (value >= flat.high if flat.high_open else value > float(flat.high)):
        return False
    if flat.multiple is None:
        return True
    if isinstance(value, int) and flat.multiple.denominator == 1:
        return value % flat.multiple.numerator == 0
    quotient = value / float(flat.multiple)
    return quotient == int(quotient) and (as_fraction(value) / flat.multiple).denominator == 1


def _fits_string(value: str, flat: Flat) -> bool:
    if len(value) < flat.min_length or (flat.max_length is not None and len(value) > flat.max_length):
        return False
    return all(re.search(pattern, value) for pattern in flat.patterns)


def _fits_object(value: Mapping[str, Any], flat: Flat, document: Document) -> bool:
    if len(value) < flat.min_properties or (flat.max_properties is not None and len(value) > flat.max_properties):
        return False
    if not all(name in value for name in flat.required):
        return False
    return all(
        satisfies(part, property_schema(flat, name), document) and satisfies(name, flat.names, document)
        for name, part in value.items()
    )


def _fits_array(value: list[Any], flat: Flat, document: Document) -> bool:
    if len(value) < flat.min_items or (flat.max_items is not None and len(value) > flat.max_items):
        return False
    if flat.unique and len({canonical(part) for part in value}) < len(value):
        return False
    return all(satisfies(part, flat.first[n] if n < len(flat.first) else flat.items, document) for n, part in enumerate(value))
