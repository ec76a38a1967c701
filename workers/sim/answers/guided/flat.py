"""Flat schemas: the requirements on one value by the keywords of one JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Schema = Mapping[str, Any] | bool

ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The requirements on one value. `values`: it is one of these, besides the rest; `none`: schemas it must not satisfy."""

    types: frozenset[str] = ANY_TYPE
    hints: frozenset[str] = frozenset()  # types that keywords imply, where no type is named
    values: tuple[Any, ...] | None = None
    low: Fraction | None = None
    low_open: bool = False  # `low` itself is not allowed
    high: Fraction | None = None
    high_open: bool = False
    multiple: Fraction | None = None
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    format: str = ""
    properties: Mapping[str, Schema] | None = None
    by_pattern: tuple[tuple[str, Schema], ...] = ()
    others: Schema = True  # the schema of undeclared properties
    names: Schema = True
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    first: tuple[Schema, ...] = ()
    items: Schema = True
    min_items: int = 0
    max_items: int | None = None
    unique: bool = False
    none: tuple[Schema, ...] = ()


_TYPE_OF = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(
        (
            "properties",
            "patternProperties",
            "additionalProperties",
            "propertyNames",
            "required",
            "minProperties",
            "maxProperties",
        ),
        "object",
    ),
}


def read_keywords(schema: Mapping[str, Any]) -> Flat:
    """Read a schema's own keywords, without references and alternatives."""
    get = schema.get
    types = get("type")
    values = None
    if "enum" in schema:
        values = tuple(schema["enum"])
    if "const" in schema:
        values = (schema["const"],) if values is None else tuple(v for v in values if json_equal(v, schema["const"]))
    low, low_open = _bound(get("minimum"), get("exclusiveMinimum"), max)
    high, high_open = _bound(get("maximum"), get("exclusiveMaximum"), min)
    return Flat(
        types=ANY_TYPE if types is None else _with_integers(frozenset([types] if isinstance(types, str) else types)),
        hints=frozenset(_TYPE_OF[name] for name in schema if name in _TYPE_OF),
        values=values,
        low=low,
        low_open=low_open,
        high=high,
        high_open=high_open,
        multiple=as_fraction(schema["multipleOf"]) if "multipleOf" in schema else None,
        min_length=int(get("minLength", 0)),
        max_length=_count(get("maxLength")),
        patterns=(schema["pattern"],) if "pattern" in schema else (),
        format=get("format", ""),
        properties=get("properties"),
        by_pattern=tuple(get("patternProperties", {}).items()),
        others=get("additionalProperties", True),
        names=get("propertyNames", True),
        required=tuple(dict.fromkeys(get("required", ()))),
        min_properties=int(get("minProperties", 0)),
        max_properties=_count(get("maxProperties")),
        first=tuple(get("prefixItems", ())),
        items=get("items", True),
        min_items=int(get("minItems", 0)),
        max_items=_count(get("maxItems")),
        unique=bool(get("uniqueItems", False)),
        none=(schema["not"],) if "not" in schema else (),
    )


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    """Add `integer` where `number` is allowed: an integer is a number."""
    return types | {"integer"} if "number" in types else types


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def as_fraction(value: float) -> Fraction:
    """Return a number as it was written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _bound(closed: float | None, open_: float | None, tighter: Any) -> tuple[Fraction | None, bool]:
    bounds = [(as_fraction(value), is_open) for value, is_open in ((closed, False), (open_, True)) if value is not None]
    if not bounds:
        return None, False
    limit = tighter(value for value, _ in bounds)
    return limit, any(is_open for value, is_open in bounds if value == limit)


def json_equal(a: Any, b: Any) -> bool:
    """Compare two JSON values: 1 equals 1.0, but not true."""
    return bool(canonical(a) == canonical(b))


def canonical(value: Any) -> Any:
    """Return a hashable form that is equal for equal JSON values."""
    if isinstance(value, bool) or value is None:
        return ("literal", value)
    if isinstance(value, Mapping):
        return ("object", frozenset((name, canonical(part)) for name, part in value.items()))
    if isinstance(value, (list, tuple)):
        return ("array", tuple(map(canonical, value)))
    return value
