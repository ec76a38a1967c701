"""JSON schemas expanded into flat ones, without references and alternatives.

A schema stands for any number of *flats*: one per way through its `anyOf` and `oneOf`, merged with everything that `allOf`,
`$ref` and the keywords beside them require.  Only one level is expanded: a flat holds schemas for properties and items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from headrace.workers.sim.answers.guided.errors import Unsupported
from headrace.workers.sim.answers.guided.flat import Flat, Schema, read_keywords
from headrace.workers.sim.answers.guided.schema_merge import merge

_MOST_FLATS = 512
_NO_FLATS: list[Flat] = []


class Document:
    """A whole schema, against which references are resolved."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._known: dict[int, tuple[Schema, list[Flat]]] = {}  # keeps the schemas alive, and so their ids valid
        self._open: set[int] = set()

    def flats(self, schema: Schema) -> list[Flat]:
        """Return a flat per way to satisfy the schema; none for `false`. Raises Unsupported for bad references or too many."""
        if isinstance(schema, bool):
            return [Flat()] if schema else _NO_FLATS
        known = self._known.get(id(schema))
        if known is not None:
            return known[1]
        if id(schema) in self._open:  # the schema is one of its own alternatives, which adds nothing
            return _NO_FLATS
        self._open.add(id(schema))
        try:
            flats = self._expand(schema)
        finally:
            self._open.discard(id(schema))
        if not self._open:  # inside a circle a result may be incomplete
            self._known[id(schema)] = schema, flats
        return flats

    def _expand(self, schema: Mapping[str, Any]) -> list[Flat]:
        flats = [read_keywords(schema)]
        if "$ref" in schema:
            flats = self._cross(flats, self.flats(self.resolve(schema["$ref"])))
        for part in schema.get("allOf", ()):
            flats = self._cross(flats, self.flats(part))
        if "anyOf" in schema:
            flats = self._cross(flats, [flat for part in schema["anyOf"] for flat in self.flats(part)])
        if "oneOf" in schema:
            parts = schema["oneOf"]
            ways = []
            for number, part in enumerate(parts):
                others = (*parts[:number], *parts[number + 1 :])
                ways += [replace(flat, none=(*flat.none, *others)) for flat in self.flats(part)]
            flats = self._cross(flats, ways)
        return flats

    def _cross(self, ones: Sequence[Flat], others: Sequence[Flat]) -> list[Flat]:
        if len(ones) * len(others) > _MOST_FLATS:
            raise Unsupported(f"more than {_MOST_FLATS} combinations of alternatives (anyOf, oneOf, allOf)")
        return [merged for one in ones for other in others if (merged := merge(one, other)) is not None]

    def resolve(self, reference: str) -> Schema:
        """Return the schema that a reference into this document points at. Raises Unsupported."""
        if reference != "#" and not reference.startswith("#/"):
            raise Unsupported(f"$ref {reference!r} points outside of the schema")
        found: Any = self.root
        for step in reference.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise Unsupported(f"$ref {reference!r} points at nothing")
        if not isinstance(found, (Mapping, bool)):
            raise Unsupported(f"$ref {reference!r} points at something that is not a schema")
        return found
