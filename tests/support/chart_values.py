"""Finds the places of values in a chart's schema, another value for each, and any values that the schema allows."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Place = tuple[str, ...]
TEXTS = ("abc", "1.25", "x1", "other.json", "/etc/other", "nats://other:4222", "sha256:" + "a" * 64, "77s", "7Gi", "a=b", "")
KEYS = ("extra", "EXTRA", "example.com/extra", "extra_key")
# what YAML reads as something else than a text, or would end a line or a quote
AWKWARD = (
    "1",
    "0",
    "1.5",
    "true",
    "no",
    "null",
    "y",
    "1e3",
    "0x1f",
    "a: b",
    "# a",
    "{}",
    "[a",
    "'",
    '"',
    "~",
    "- a",
    "*a",
    "&a",
    "%a",
    "a" * 16,
)
FREE: dict[str, Any] = {"nodeAffinity": {}}  # where the schema leaves an object to Kubernetes


def places(schema: Any, root: Any, names: dict[Place, tuple[str, ...]], at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Each value that can be set, with its schema. `names` gives the keys of maps that are the user's own, by place."""
    schema = resolved(schema, root)
    properties = schema.get("properties", {})
    inner = {name: properties[name] for name in properties}
    if isinstance(schema.get("additionalProperties"), dict):
        inner |= dict.fromkeys(names.get(at, ()), schema["additionalProperties"])
    if not inner:
        yield at, schema
    for name, below in inner.items():
        yield from places(below, root, names, (*at, name))


def resolved(schema: Any, root: Any) -> Any:
    while "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def another(schema: Any, root: Any, now: Any) -> Any:
    """Return a value that the schema allows and that is not the present one."""
    schema = resolved(schema, root)
    if "enum" in schema:
        return next(value for value in schema["enum"] if value != now)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "boolean" in kinds and len(kinds) == 1:
        return not now
    if "integer" in kinds:
        up = max((now or 0) + 3, schema.get("minimum", 0))
        return up if up <= schema.get("maximum", up) else now - 1
    if "string" in kinds:
        fits = [text for text in TEXTS if text not in ("", now) and re.search(schema.get("pattern", ""), text)]
        return fits[0]
    if "array" in kinds:
        return [*(now or []), another(schema["items"], root, None)]
    if "additionalProperties" in schema and schema["additionalProperties"] is not False:
        pattern = schema.get("propertyNames", {}).get("pattern", "")
        key = next(key for key in KEYS if re.search(pattern, key))
        return {**(now or {}), key: another(schema["additionalProperties"], root, None)}
    if schema.get("properties"):
        name, below = next(iter(schema["properties"].items()))
        return {**(now or {}), name: another(below, root, None)}
    return {**(now or {}), **FREE}


def at(values: Any, place: Place) -> Any:
    """Return the value at a place, or None."""
    for name in place:
        values = (values or {}).get(name)
    return values


def with_value(values: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """Return the values with another one at a place."""
    changed = copy.deepcopy(values)
    inner = changed
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = value
    return changed


def any_value(schema: Any, root: Any, left_out: frozenset[str] = frozenset()) -> st.SearchStrategy[Any]:
    """Draw values that the schema allows, without those of these names, which the schema leaves to Kubernetes."""
    schema = resolved(schema, root)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "boolean" in kinds:
        return st.booleans()
    if "string" in kinds:
        fits = [text for text in (*TEXTS, *AWKWARD) if re.search(schema.get("pattern", ""), text)]
        return st.sampled_from(fits)
    if "integer" in kinds:
        return st.integers(schema.get("minimum", 0), schema.get("maximum", 2**31 - 1))
    if "array" in kinds:
        unique = repr if schema.get("uniqueItems") else None
        return st.lists(any_value(schema["items"], root, left_out), max_size=2, unique_by=unique)
    below = {
        name: any_value(inner, root, left_out) for name, inner in schema.get("properties", {}).items() if name not in left_out
    }
    if isinstance(schema.get("additionalProperties"), dict):
        names = st.sampled_from([key for key in (*KEYS, *AWKWARD) if re.search(schema["propertyNames"]["pattern"], key)])
        return st.dictionaries(names, any_value(schema["additionalProperties"], root, left_out), max_size=2)
    return st.fixed_dictionaries({}, optional=below)
