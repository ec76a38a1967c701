"""Validation of a whole JSON schema before anything is drawn: it is well-formed, and the simulator supports it.

Unknown names are annotations, as in the standard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from headrace.workers.sim.answers.guided.errors import Unsupported

TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")

_UNSUPPORTED = frozenset({
    "if", "then", "else", "contains", "minContains", "maxContains", "additionalItems", "dependencies", "dependentRequired",
    "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$anchor", "$dynamicRef", "$dynamicAnchor",
    "$recursiveRef", "$recursiveAnchor",
})  # fmt: skip
_SCHEMA = ("items", "additionalProperties", "propertyNames", "not")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("$ref", "pattern", "format")


def vet(schema: Any, path: str = "$") -> None:
    """Validate a schema. Raises Unsupported, which names the keyword and its place."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise Unsupported(f"{path} must be a schema, not {schema!r}")
    for name, value in schema.items():
        here = f"{path}.{name}"
        if name in _UNSUPPORTED:
            raise Unsupported(f"{here}: the simulator cannot follow the keyword {name!r}")
        if name in _SCHEMA:
            vet(value, here)
        elif name in _SCHEMAS:
            if not isinstance(value, list) or (not value and name != "prefixItems"):
                raise Unsupported(f"{here} must be a list of schemas, not {value!r}")
            for number, part in enumerate(value):
                vet(part, f"{here}[{number}]")
        elif name in _NAMED:
            if not isinstance(value, Mapping):
                raise Unsupported(f"{here} must be an object of schemas, not {value!r}")
            for key, part in value.items():
                vet(part, f"{here}.{key}")
        else:
            _vet_value(name, value, here)


def _vet_value(name: str, value: Any, here: str) -> None:
    wanted = _WANTED.get(name)
    if wanted is not None and not wanted[1](value):
        raise Unsupported(f"{here}={value!r} must be {wanted[0]}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _are_types(value: Any) -> bool:
    return all(one in TYPES for one in (value if isinstance(value, list) else [value]))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_COUNTS, ("a whole number of at least 0", lambda v: _is_number(v) and v >= 0 and v == int(v))),
    **dict.fromkeys(_NUMBERS, ("a number", _is_number)),
    **dict.fromkeys(_TEXTS, ("a text", lambda v: isinstance(v, str))),
    "multipleOf": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "uniqueItems": ("true or false", lambda v: isinstance(v, bool)),
    "type": (f"of {', '.join(TYPES)}", _are_types),
    "enum": ("a list of values", lambda v: isinstance(v, list) and bool(v)),
    "required": ("a list of names", _are_names),
}
