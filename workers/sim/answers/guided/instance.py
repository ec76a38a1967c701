"""Makes values that a JSON schema allows.

The depth of a value is limited by a budget of levels. Alternatives, optional properties and items that need more levels than
are left are not taken, so a recursive schema ends wherever it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from headrace.workers.sim.answers.guided.check import fits, fits_number, satisfies
from headrace.workers.sim.answers.guided.draws import Draws
from headrace.workers.sim.answers.guided.errors import NoInstance, Unsupported
from headrace.workers.sim.answers.guided.flat import ANY_TYPE, Flat, Schema, canonical
from headrace.workers.sim.answers.guided.formats import FORMATS, words
from headrace.workers.sim.answers.guided.pattern import Pattern
from headrace.workers.sim.answers.guided.schema import Document
from headrace.workers.sim.answers.guided.schema_merge import property_schema

_LEVELS = 5  # depth budget for a schema that needs no more
_MOST_LEVELS = 48
_MANY_VALUES = 200  # from this many values on, only required parts are drawn
_MOST_VALUES = 5_000
_TRIES = 24
_MANY_TRIES = 200  # tries to draw a value that must differ from others
_SIZE = 100  # length of the range of numbers that has one open end
_MOST_CHARACTERS = 1 << 16
_ORDER = ("string", "integer", "number", "boolean", "null", "array", "object")


def instance(schema: Schema, draws: Draws) -> Any:
    """Draw a value that satisfies a vetted schema. Raises Unsupported if there is none, or none was found."""
    return Maker(Document(schema), draws).make(schema)


class Maker:
    """Draws values of the schemas of one document."""

    def __init__(self, document: Document, draws: Draws) -> None:
        self._document = document
        self._draws = draws
        self._values = 0
        self._reaches: dict[tuple[int, int], bool] = {}
        self._patterns: dict[str, Pattern] = {}

    def make(self, schema: Schema) -> Any:
        levels = next((n for n in range(1, _MOST_LEVELS + 1) if self._can_end(schema, n)), None)
        if levels is None:
            raise Unsupported(f"no value of at most {_MOST_LEVELS} levels satisfies the schema")
        try:
            return self._value(schema, max(levels, _LEVELS))
        except NoInstance as error:
            raise Unsupported(f"no value was found that satisfies the schema: {error}") from None

    # -- how deep it must get --------------------------------------------------------------------------------

    def _can_end(self, schema: Schema, levels: int) -> bool:
        """Check, as far as the shape tells, that a value can end within this many levels."""
        if levels <= 0:
            return False
        key = id(schema), levels
        known = self._reaches.get(key)
        if known is None:
            known = self._reaches[key] = any(self._flat_reach(flat, levels) for flat in self._document.flats(schema))
        return known

    def _flat_reach(self, flat: Flat, levels: int) -> bool:
        return flat.values is not None or any(self._type_reach(kind, flat, levels) for kind in flat.types)

    def _type_reach(self, kind: str, flat: Flat, levels: int) -> bool:
        if kind == "object":
            return all(self._can_end(self._kept(property_schema(flat, name)), levels - 1) for name in flat.required)
        if kind == "array":
            needed = [*flat.first[: flat.min_items], *([flat.items] if flat.min_items > len(flat.first) else [])]
            return all(self._can_end(schema, levels - 1) for schema in needed)
        return True

    def _kept(self, schema: Schema) -> Schema:
        self._document.flats(schema)  # keeps the schema alive, and so its id valid
        return schema

    # -- values ----------------------------------------------------------------------------------------------

    def _value(self, schema: Schema, levels: int) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise Unsupported(f"the schema asks for more than {_MOST_VALUES} values")
        why = NoInstance("nothing is allowed here")
        for flat in self._draws.shuffled(f for f in self._document.flats(schema) if self._flat_reach(f, levels)):
            try:
                return self._of(flat, levels)
            except NoInstance as error:
                why = error
        raise why

    def _of(self, flat: Flat, levels: int) -> Any:
        if flat.values is not None:
            allowed = [value for value in flat.values if fits(value, flat, self._document)]
            if not allowed:
                raise NoInstance("none of the values of an enum or const fits the rest")
            return self._draws.pick(allowed)
        why = NoInstance("nothing fits")
        for _ in range(_MANY_TRIES if flat.none else 1):
            for kind in self._kinds(flat, levels):
                try:
                    value = self._of_type(kind, flat, levels)
                except NoInstance as error:
                    why = error
                    continue
                if not any(satisfies(value, schema, self._document) for schema in flat.none):
                    return value
        raise why

    def _kinds(self, flat: Flat, levels: int) -> list[str]:
        """Return the types to try in drawn order, beginning with those that keywords imply."""
        types = [kind for kind in _ORDER if kind in flat.types and self._type_reach(kind, flat, levels)]
        if "number" in types and "integer" in types and flat.types != ANY_TYPE:
            types.remove("integer")  # integers are among the numbers
        hinted = [kind for kind in types if kind in flat.hints] if flat.types == ANY_TYPE else types
        return [*self._draws.shuffled(hinted), *self._draws.shuffled(kind for kind in types if kind not in hinted)]

    def _of_type(self, kind: str, flat: Flat, levels: int) -> Any:
        makers: dict[str, Callable[[Flat, int], Any]] = {
            "string": lambda flat, _: self._string(flat),
            "integer": lambda flat, _: self._number(flat, whole=True),
            "number": lambda flat, _: self._number(flat, whole=False),
            "boolean": lambda *_: self._draws.one_in(2),
            "null": lambda *_: None,
            "array": self._array,
            "object": self._object,
        }
        return makers[kind](flat, levels)

    def _string(self, flat: Flat) -> str:
        least, most = flat.min_length, _MOST_CHARACTERS if flat.max_length is None else flat.max_length
        if least > min(most, _MOST_CHARACTERS):
            raise NoInstance(f"no string has at least {least} and at most {most} characters")
        if flat.patterns:
            for _ in range(_TRIES):
                text = self._pattern(flat.patterns[0]).draw(self._draws, least=least, most=most)
                if len(flat.patterns) == 1 or fits(text, Flat(patterns=flat.patterns[1:]), self._document):
                    return text
            raise NoInstance(f"no string was found for {len(flat.patterns)} patterns at once")
        if flat.format in FORMATS:
            text = FORMATS[flat.format](self._draws)
            if least <= len(text) <= most:
                return text
        return words(self._draws, least, most)

    def _pattern(self, pattern: str) -> Pattern:
        if pattern not in self._patterns:
            self._patterns[pattern] = Pattern(pattern)
        return self._patterns[pattern]

    def _number(self, flat: Flat, *, whole: bool) -> float:
        step = flat.multiple
        if whole:
            step = Fraction(1 if step is None else step.numerator)
        if step is None:
            step = Fraction(1, 100)
            if flat.low is not None and flat.high is not None:
                while step > (flat.high - flat.low) / 10 and flat.high > flat.low:
                    step /= 10
                if flat.high == flat.low:
                    return _plain(flat.low)
        first, last = self._range(flat, step)
        for _ in range(_TRIES):
            value = _plain((first + self._draws.below(last - first + 1)) * step)
            if fits_number(value, flat):
                return value
        raise NoInstance("no number was found within the bounds")

    def _range(self, flat: Flat, step: Fraction) -> tuple[int, int]:
        """Return the first and last multiple of `step` to draw from."""
        first = last = None
        if flat.low is not None:
            first = math.floor(flat.low / step) + 1 if flat.low_open else math.ceil(flat.low / step)
        if flat.high is not None:
            last = math.ceil(flat.high / step) - 1 if flat.high_open else math.floor(flat.high / step)
        size = math.ceil(_SIZE / step)
        if first is None:
            first = min(0, last) if last is not None and last < size else 0
            first = first if last is None or last >= 0 else last - size
        if last is None:
            last = max(first, 0) + size
        if first > last:
            raise NoInstance("no number lies within the bounds")
        return first, last

    def _array(self, flat: Flat, levels: int) -> list[Any]:
        most = flat.max_items
        wanted = max(flat.min_items, len(flat.first) if self._values < _MANY_VALUES else 0)
        if self._values < _MANY_VALUES and flat.items is not False:
            wanted += self._draws.below(3) + (flat.min_items == 0 and not flat.first)
        wanted = wanted if most is None else min(wanted, most)
        values: list[Any] = []
        seen: set[Any] = set()
        for number in range(wanted):
            schema = flat.first[number] if number < len(flat.first) else flat.items
            try:
                value = self._item(schema, levels, seen if flat.unique else None)
            except NoInstance:
                if number < flat.min_items:
                    raise
                break
            seen.add(canonical(value))
            values.append(value)
        if len(values) < flat.min_items:
            raise NoInstance("fewer items than there must be")
        return values

    def _item(self, schema: Schema, levels: int, unlike: set[Any] | None) -> Any:
        if not self._can_end(schema, levels - 1):
            raise NoInstance("an item would get too deep")
        for _ in range(_MANY_TRIES):
            value = self._value(schema, levels - 1)
            if unlike is None or canonical(value) not in unlike:
                return value
        raise NoInstance("no more different items were found")

    def _object(self, flat: Flat, levels: int) -> dict[str, Any]:
        room = math.inf if flat.max_properties is None else flat.max_properties
        if len(flat.required) > room:
            raise NoInstance("more required properties than there may be")
        room -= len(flat.required)
        made: dict[str, Any] = {}
        for name in flat.properties or ():
            if name in flat.required:
                made[name] = self._property(flat, name, levels)
            elif room and self._values < _MANY_VALUES and not self._draws.one_in(4) and self._may_have(flat, name, levels):
                try:
                    made[name] = self._property(flat, name, levels)
                except NoInstance:
                    continue
                room -= 1
        for name in flat.required:
            if name not in made:
                made[name] = self._property(flat, name, levels)
        for name in flat.properties or ():  # the draw left out too many
            if len(made) < flat.min_properties and name not in made and self._may_have(flat, name, levels):
                made[name] = self._property(flat, name, levels)
        self._add_others(flat, made, levels)
        if not all(satisfies(name, flat.names, self._document) for name in made):
            raise NoInstance("propertyNames does not allow a name that is required")
        if len(made) < flat.min_properties:
            raise NoInstance("fewer properties than there must be")
        return made

    def _may_have(self, flat: Flat, name: str, levels: int) -> bool:
        return self._can_end(self._kept(property_schema(flat, name)), levels - 1) and satisfies(
            name, flat.names, self._document
        )

    def _property(self, flat: Flat, name: str, levels: int) -> Any:
        return self._value(property_schema(flat, name), levels - 1)

    def _add_others(self, flat: Flat, made: dict[str, Any], levels: int) -> None:
        """Add properties without a declared name, where more are required or there would be none at all."""
        wanted = flat.min_properties
        if not flat.properties and not flat.required and self._values < _MANY_VALUES:
            wanted = max(wanted, 1 + self._draws.below(3))
        if flat.max_properties is not None:
            wanted = min(wanted, flat.max_properties)
        for _ in range(_TRIES * 2 + wanted * 4):
            if len(made) >= wanted:
                return
            try:
                name = self._name(flat)
                if name not in made and self._may_have(flat, name, levels):
                    made[name] = self._property(flat, name, levels)
            except NoInstance:
                continue

    def _name(self, flat: Flat) -> str:
        if flat.names is not True:
            name = self._value({"allOf": [flat.names, {"type": "string"}]}, 2)
            return str(name)
        if flat.by_pattern and (flat.others is False or self._draws.one_in(2)):
            return self._pattern(self._draws.pick(flat.by_pattern)[0]).draw(self._draws, least=1)
        return self._draws.word()


def _plain(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)
