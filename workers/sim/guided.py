"""Values that a JSON schema allows, for the keywords that clients send; any other keyword is refused by name.

A schema stands for its *ways*: plain keywords, one set per way through its `anyOf` and `oneOf`, merged with everything that
`allOf`, `$ref` and the keywords beside them require. The depth of a value is limited by a budget of levels: alternatives,
optional properties and items that need more levels than are left are not taken, so a recursive schema ends wherever it can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.guided_strings import FORMATS, MOST_CHARACTERS, Draws, NoInstance, Pattern, Unsupported, words

Schema = Mapping[str, Any] | bool
Way = Mapping[str, Any]

_LEVELS = 5  # depth budget for a schema that needs no more
_MOST_LEVELS = 48
_MOST_WAYS = 512
_MANY_VALUES = 200  # from this many values on, only required parts are drawn
_MOST_VALUES = 5_000
_TRIES = 24
_MANY_TRIES = 200  # tries to draw an item that must differ from others
_SIZE = 100  # length of the range of numbers that has one open end

_KEYWORDS_OF = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_PLAIN = frozenset({"type", "enum", "const", *(name for names in _KEYWORDS_OF.values() for name in names)})
_COMBINING = ("allOf", "anyOf", "oneOf")
_UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "additionalItems", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "multipleOf", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    "$recursiveAnchor",
})  # fmt: skip
_STRICTER: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}


def draw_json(given: Any, draws: Draws) -> str:
    """Draw a value of a schema and write it as JSON text. Raises Unsupported or NoInstance."""
    schema = parse_json(given)
    document = _Document(schema)
    for part in list(_vetted(schema, "$")):  # what is refused does not depend on what is drawn
        document.ways(part)
    return json.dumps(_Maker(document, draws).make(), ensure_ascii=False)


def parse_json(given: Any) -> Any:
    """Decode a schema that came as JSON text; return any other value as it is. Raises Unsupported for bad JSON."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError as error:
        raise Unsupported(f"this is not JSON: {error}") from None


# -- the check before anything is drawn ------------------------------------------------------------------------


def _vetted(schema: Any, path: str) -> Iterator[Schema]:
    """Iterate over a schema and those in it. Raises Unsupported, which names a keyword and its place.

    Unknown names are annotations, as in the standard.
    """
    if not isinstance(schema, Mapping | bool):
        raise Unsupported(f"{path} must be a schema, not {schema!r}")
    for name, value in schema.items() if isinstance(schema, Mapping) else ():
        here = f"{path}.{name}"
        if name in _UNSUPPORTED:
            raise Unsupported(f"{here}: the simulator cannot follow the keyword {name!r}")
        if name in ("items", "additionalProperties"):
            yield from _vetted(value, here)
        elif name in (*_COMBINING, "prefixItems"):
            if not isinstance(value, list) or not value:
                raise Unsupported(f"{here} must be a list of schemas, not {value!r}")
            for number, part in enumerate(value):
                yield from _vetted(part, f"{here}[{number}]")
        elif name in ("properties", "$defs", "definitions"):
            if not isinstance(value, Mapping):
                raise Unsupported(f"{here} must be an object of schemas, not {value!r}")
            for key, part in value.items():
                yield from _vetted(part, f"{here}.{key}")
        elif name in _WANTED and not _WANTED[name][1](value):
            raise Unsupported(f"{here}={value!r} must be {_WANTED[name][0]}")
    yield schema


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems"),
        ("a whole number of at least 0", lambda v: _is_number(v) and v >= 0 and v == int(v)),
    ),
    **dict.fromkeys(_KEYWORDS_OF["number"], ("a number", _is_number)),
    **dict.fromkeys(("$ref", "pattern", "format"), ("a text", lambda v: isinstance(v, str))),
    "uniqueItems": ("true or false", lambda v: isinstance(v, bool)),
    "type": (f"of {', '.join(TYPES)}", lambda v: all(one in TYPES for one in (v if isinstance(v, list) else [v]))),
    "enum": ("a list of values", lambda v: isinstance(v, list) and bool(v)),
    "required": ("a list of names", lambda v: isinstance(v, list) and all(isinstance(one, str) for one in v)),
}


# -- ways ------------------------------------------------------------------------------------------------------


class _Document:
    """A whole schema, against which references are resolved."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._known: dict[int, tuple[Schema, list[Way]]] = {}  # keeps the schemas alive, and so their ids valid
        self._open: set[int] = set()

    def ways(self, schema: Schema) -> list[Way]:
        """Return the ways to satisfy a schema; none for `false`. Raises Unsupported for bad references or too many."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        if (known := self._known.get(id(schema))) is not None:
            return known[1]
        if id(schema) in self._open:  # the schema is one of its own alternatives, which adds nothing
            return []
        self._open.add(id(schema))
        try:
            ways = self._expand(schema)
        finally:
            self._open.discard(id(schema))
        if not self._open:  # inside a circle a result may be incomplete
            self._known[id(schema)] = schema, ways
        return ways

    def _expand(self, schema: Mapping[str, Any]) -> list[Way]:
        own = {name: value for name, value in schema.items() if name in _PLAIN}
        if "const" in own:
            own = _merge({**own, "enum": own.get("enum", [own["const"]])}, {"enum": [own["const"]]}) or {"enum": []}
            own.pop("const", None)
        ways: list[Way] = [own]
        if "$ref" in schema:
            ways = self._cross(ways, self.ways(self.resolve(schema["$ref"])))
        for part in schema.get("allOf", ()):
            ways = self._cross(ways, self.ways(part))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                parts = [self.ways(part) for part in schema[name]]
                if name == "oneOf":
                    self._check_apart(parts)
                ways = self._cross(ways, [way for part in parts for way in part])
        if beside := sorted(name for way in ways if "enum" in way for name in way.keys() - {"enum", "type"}):
            raise Unsupported(f"the simulator cannot follow {beside[0]!r} beside enum or const")
        return ways

    def _cross(self, ones: Sequence[Way], others: Sequence[Way]) -> list[Way]:
        if len(ones) * len(others) > _MOST_WAYS:
            raise Unsupported(f"more than {_MOST_WAYS} combinations of alternatives (anyOf, oneOf, allOf)")
        return [merged for one in ones for other in others if (merged := _merge(one, other)) is not None]

    def _check_apart(self, parts: Sequence[Sequence[Way]]) -> None:
        """Raise Unsupported unless it is plain that no value satisfies two parts of a `oneOf`."""
        for number, part in enumerate(parts):
            for other in parts[number + 1 :]:
                if not all(self._apart(a, b) for a in part for b in other):
                    raise Unsupported("the simulator cannot follow a oneOf whose alternatives overlap; anyOf may do")

    def _apart(self, a: Way, b: Way) -> bool:
        if "enum" in a and "enum" in b:
            return not any(_equal(x, y) for x in a["enum"] for y in b["enum"])
        if not _types(a) & _types(b):
            return True
        named = (name for name in a.get("required", ()) if name in b.get("required", ()))
        return any(
            all(self._apart(x, y) for x in self.ways(_property(a, name)) for y in self.ways(_property(b, name)))
            for name in named
            if _property(a, name) is not True and _property(b, name) is not True
        )

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
        if not isinstance(found, Mapping | bool):
            raise Unsupported(f"$ref {reference!r} points at something that is not a schema")
        return found


def _types(way: Way) -> frozenset[str]:
    """Return the types of a way; those that its keywords are about where none is named, and a number may be an integer."""
    given = way.get("type")
    if given is None and "enum" in way:
        return frozenset(_type_of(value) for value in way["enum"])
    if given is None:
        return frozenset(TYPES)
    types = frozenset([given] if isinstance(given, str) else given)
    return types | {"integer"} if "number" in types else types


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def _merge(a: Way, b: Way) -> dict[str, Any] | None:
    """Return what requires both. None where it is plain that no value satisfies both; Unsupported where that is not known."""
    merged = {**a, **b}
    for name in a.keys() & b.keys():
        x, y = a[name], b[name]
        if name in _STRICTER:
            merged[name] = _STRICTER[name](x, y)
        elif name == "type":
            merged[name] = sorted(_types(a) & _types(b))
        elif name == "enum":
            merged[name] = [value for value in x if any(_equal(value, other) for other in y)]
        elif name == "required":
            merged[name] = list(dict.fromkeys((*x, *y)))
        elif name == "properties":
            merged[name] = {key: _both(x.get(key, True), y.get(key, True)) for key in {**x, **y}}
        elif name in ("items", "additionalProperties"):
            merged[name] = _both(x, y)
        elif x != y:
            raise Unsupported(f"the simulator cannot follow {name!r} twice for one value: {x!r} and {y!r}")
    for one, other in ((a, b), (b, a)):
        closed = one.get("additionalProperties", True) is not True
        if closed and other.get("properties", {}).keys() - one.get("properties", {}).keys():
            raise Unsupported("the simulator cannot follow additionalProperties apart from the properties that it is beside")
        if "items" in one and "prefixItems" in other and "prefixItems" not in one:
            raise Unsupported("the simulator cannot follow items apart from the prefixItems that it is beside")
    return None if merged.get("enum") == [] or merged.get("type") == [] else merged


def _both(a: Schema, b: Schema) -> Schema:
    return b if a is True or a is b else a if b is True else {"allOf": [a, b]}


def _property(way: Way, name: str) -> Schema:
    found: Schema = way.get("properties", {}).get(name, way.get("additionalProperties", True))
    return found


def _equal(a: Any, b: Any) -> bool:
    """Compare two JSON values: 1 equals 1.0, but not true."""
    return bool(_canonical(a) == _canonical(b))


def _canonical(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return ("literal", value)
    if isinstance(value, Mapping):
        return ("object", frozenset((name, _canonical(part)) for name, part in value.items()))
    return ("array", tuple(map(_canonical, value))) if isinstance(value, list | tuple) else value


# -- values ----------------------------------------------------------------------------------------------------


class _Maker:
    def __init__(self, document: _Document, draws: Draws) -> None:
        self._root = document.root
        self._document = document
        self._draws = draws
        self._values = 0
        self._reaches: dict[tuple[int, int], bool] = {}
        self._kept: list[Schema] = []  # whose ids are keys of `_reaches`
        self._patterns: dict[str, Pattern] = {}

    def make(self) -> Any:
        levels = next((n for n in range(1, _MOST_LEVELS + 1) if self._can_end(self._root, n)), None)
        if levels is None:
            raise Unsupported(f"no value of at most {_MOST_LEVELS} levels satisfies the schema")
        try:
            return self._value(self._root, max(levels, _LEVELS))
        except NoInstance as error:
            raise Unsupported(f"no value was found that satisfies the schema: {error}") from None

    def _can_end(self, schema: Schema, levels: int) -> bool:
        """Check, as far as the shape tells, that a value can end within this many levels."""
        if levels <= 0:
            return False
        key = id(schema), levels
        if key not in self._reaches:
            self._kept.append(schema)
            self._reaches[key] = any(self._ends(way, levels) for way in self._document.ways(schema))
        return self._reaches[key]

    def _ends(self, way: Way, levels: int) -> bool:
        return "enum" in way or any(self._type_ends(kind, way, levels) for kind in _types(way))

    def _type_ends(self, kind: str, way: Way, levels: int) -> bool:
        if kind == "object":
            return all(self._can_end(_property(way, name), levels - 1) for name in way.get("required", ()))
        if kind == "array":
            needed = min(int(way.get("minItems", 0)), len(way.get("prefixItems", ())) + 1)
            return all(self._can_end(_item(way, number), levels - 1) for number in range(needed))
        return True

    def _value(self, schema: Schema, levels: int) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise Unsupported(f"the schema asks for more than {_MOST_VALUES} values")
        why = NoInstance("nothing is allowed here")
        for way in self._draws.shuffled(way for way in self._document.ways(schema) if self._ends(way, levels)):
            try:
                return self._of(way, levels)
            except NoInstance as error:
                why = error
        raise why

    def _of(self, way: Way, levels: int) -> Any:
        if "enum" in way:
            allowed = [value for value in way["enum"] if _type_of(value) in _types(way)]
            if not allowed:
                raise NoInstance("none of the values of an enum or const has the type")
            return self._draws.pick(allowed)
        types = _types(way)
        kinds = [kind for kind in TYPES if kind in types and self._type_ends(kind, way, levels)]
        if way.get("type") is None:
            implied = [kind for kind in kinds if any(name in way for name in _KEYWORDS_OF.get(kind, ()))]
            kinds = implied or kinds
        elif "number" in types:
            kinds.remove("integer")  # integers are among the numbers
        why = NoInstance("nothing fits")
        for kind in self._draws.shuffled(kinds):
            try:
                return self._of_type(kind, way, levels)
            except NoInstance as error:
                why = error
        raise why

    def _of_type(self, kind: str, way: Way, levels: int) -> Any:
        if kind == "object":
            return self._object(way, levels)
        if kind == "array":
            return self._array(way, levels)
        if kind == "string":
            return self._string(way)
        if kind in ("integer", "number"):
            return self._number(way, whole=kind == "integer")
        return None if kind == "null" else self._draws.one_in(2)

    def _string(self, way: Way) -> str:
        least, most = int(way.get("minLength", 0)), min(int(way.get("maxLength", MOST_CHARACTERS)), MOST_CHARACTERS)
        if least > most:
            raise NoInstance(f"no string has at least {least} and at most {most} characters")
        if (pattern := way.get("pattern")) is not None:
            if pattern not in self._patterns:
                self._patterns[pattern] = Pattern(pattern)
            return self._patterns[pattern].draw(self._draws, least=least, most=most)
        text = FORMATS[way["format"]](self._draws) if way.get("format") in FORMATS else words(self._draws, least, most)
        return text if least <= len(text) <= most else words(self._draws, least, most)

    def _number(self, way: Way, *, whole: bool) -> float:
        def fits(value: float) -> bool:
            above = value >= way.get("minimum", value) and ("exclusiveMinimum" not in way or value > way["exclusiveMinimum"])
            below = value <= way.get("maximum", value) and ("exclusiveMaximum" not in way or value < way["exclusiveMaximum"])
            return above and below

        low = max((way[name] for name in ("minimum", "exclusiveMinimum") if name in way), default=None)
        high = min((way[name] for name in ("maximum", "exclusiveMaximum") if name in way), default=None)
        if low is None:
            low = 0 if high is None or high >= _SIZE else high - _SIZE
        high = max(low, 0) + _SIZE if high is None else high
        if whole:
            first, last = math.ceil(low), math.floor(high)
            first, last = first + (not fits(first)), last - (not fits(last))
            if first <= last:
                return first + self._draws.below(last - first + 1)
            raise NoInstance("no number lies within the bounds")
        for digits in (*[2] * _TRIES, *[6] * _TRIES, *[None] * _TRIES):
            value = low + (high - low) * (self._draws.below(1001) / 1000)
            value = value if digits is None else round(value, digits)
            if fits(value):
                return int(value) if value == int(value) else value
        raise NoInstance("no number lies within the bounds")

    def _array(self, way: Way, levels: int) -> list[Any]:
        least, first = int(way.get("minItems", 0)), len(way.get("prefixItems", ()))
        wanted = least
        if self._values < _MANY_VALUES:
            wanted = max(least, first) + self._draws.below(3) + (least == 0 and not first)
        values: list[Any] = []
        for number in range(min(wanted, int(way.get("maxItems", wanted)))):
            try:
                values.append(self._item(_item(way, number), levels, values if way.get("uniqueItems") else ()))
            except NoInstance:
                if number < least:
                    raise
                break
        if len(values) < least:
            raise NoInstance("fewer items than there must be")
        return values

    def _item(self, schema: Schema, levels: int, unlike: Sequence[Any]) -> Any:
        if not self._can_end(schema, levels - 1):
            raise NoInstance("an item would get too deep")
        for _ in range(_MANY_TRIES):
            value = self._value(schema, levels - 1)
            if not any(_equal(value, other) for other in unlike):
                return value
        raise NoInstance("no more different items were found")

    def _object(self, way: Way, levels: int) -> dict[str, Any]:
        properties, required, made = way.get("properties", {}), way.get("required", ()), dict[str, Any]()
        for name in properties:
            if name in required:
                made[name] = self._value(properties[name], levels - 1)
            elif self._values < _MANY_VALUES and not self._draws.one_in(4) and self._can_end(properties[name], levels - 1):
                try:
                    made[name] = self._value(properties[name], levels - 1)
                except NoInstance:
                    continue
        for name in required:
            if name not in made:
                made[name] = self._value(_property(way, name), levels - 1)
        others = way.get("additionalProperties", True)
        if not made and not properties and self._values < _MANY_VALUES and self._can_end(others, levels - 1):
            for _ in range(1 + self._draws.below(3)):
                made[self._draws.word()] = self._value(others, levels - 1)
        return made


def _item(way: Way, number: int) -> Schema:
    first = way.get("prefixItems", ())
    found: Schema = first[number] if number < len(first) else way.get("items", True)
    return found


_HOLDS_ANYWAY = "disable_any_whitespace"  # satisfied already: the only spaces are after commas and colons


def guided_text(guided: Mapping[str, Any], draws: Draws) -> str:
    """Draw a text that satisfies the constraint.

    Raises RequestInvalid, naming the kind, and UnsupportedByEngine for a kind that the simulator does not know.
    """
    kinds = [name for name, value in guided.items() if name != _HOLDS_ANYWAY and _is_set(name, value)]
    unknown = [name for name in kinds if name not in KINDS]
    if unknown:
        known = ", ".join(KINDS)
        raise UnsupportedByEngine(
            f"the simulator has no structured output of kind {unknown[0]!r}; it has {known}", param=unknown[0]
        )
    if len(kinds) != 1:
        raise RequestInvalid(f"structured output must be of one kind, not {kinds!r}", param="guided")
    kind = kinds[0]
    try:
        return KINDS[kind](guided[kind], draws)
    except (Unsupported, NoInstance) as error:
        raise RequestInvalid(f"{kind}: {error}", param=kind) from None
    except RecursionError:
        raise RequestInvalid(f"{kind}: it is nested too deeply", param=kind) from None


def _is_set(name: str, value: Any) -> bool:
    return value is not None and (value is not False or name == "json")


def _object(given: Any, draws: Draws) -> str:
    if given is not True:
        raise Unsupported(f"it must be true, not {given!r}")
    return draw_json({"type": "object"}, draws)


def _choice(given: Any, draws: Draws) -> str:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) for one in given):
        raise Unsupported(f"it must be a list of texts, not {given!r}")
    return str(draws.pick(given))


def _regex(given: Any, draws: Draws) -> str:
    if not isinstance(given, str):
        raise Unsupported(f"it must be a text, not {given!r}")
    return Pattern(given).draw(draws)


# -- structural tags -------------------------------------------------------------------------------------------


def _tags(given: Any, draws: Draws) -> str:
    """Draw free text mixed with pieces whose form is given by their opening tag, in either notation."""
    tag = parse_json(given)
    if not isinstance(tag, Mapping):
        raise Unsupported(f"it must be an object, not {tag!r}")
    if "structures" not in tag:
        return _form(tag.get("format"), draws)
    tags = [
        {
            "begin": _field(item, "begin", str),
            "content": {"type": "json_schema", "json_schema": parse_json(_field(item, "schema", object))},
            "end": _field(item, "end", str),
        }
        for item in _field(tag, "structures", list)
    ]
    return _triggered({"tags": tags, "triggers": tag.get("triggers", [])}, draws)


def _form(given: Any, draws: Draws) -> str:
    kind = _field(given, "type", str)
    if kind not in _FORMS:
        raise Unsupported(f"the simulator does not know the format {kind!r}; it knows {', '.join(_FORMS)}")
    return _FORMS[kind](given, draws)


def _schema(form: Mapping[str, Any], draws: Draws) -> str:
    if (style := form.get("style") or "json") != "json":
        raise Unsupported(f"the simulator does not write json_schema in the style {style!r}, only 'json'")
    return draw_json(_field(form, "json_schema", object), draws)


def _tag(form: Any, draws: Draws) -> str:
    begin, end = _field(form, "begin", object), _field(form, "end", object)
    end = draws.pick(end) if isinstance(end, list) and end else end
    if not isinstance(begin, str) or not isinstance(end, str):
        raise Unsupported("the simulator knows tags that begin and end with texts, not with tokens")
    return f"{begin}{_form(_field(form, 'content', object), draws)}{end}"


def _triggered(form: Mapping[str, Any], draws: Draws) -> str:
    """Draw a text in which some tags may open, and one does where one must."""
    tags, triggers = _field(form, "tags", list), _field(form, "triggers", list)
    if not tags:
        raise Unsupported("tags is empty")
    text = words(draws, 0, 64)
    if form.get("at_least_one") or any(str(banned)[:1] in text for banned in (*triggers, *(form.get("excludes") or ()))):
        text = ""
    return text + _tag(draws.pick(tags), draws) if form.get("at_least_one") or draws.one_in(2) else text


def _field(form: Any, name: str, kind: type) -> Any:
    if not isinstance(form, Mapping) or name not in form:
        raise Unsupported(f"{form!r} needs the field {name!r}")
    if not isinstance(form[name], kind):
        raise Unsupported(f"{name}={form[name]!r} has the wrong type")
    return form[name]


_FORMS: dict[str, Callable[[Any, Draws], str]] = {
    "const_string": lambda form, _: str(_field(form, "value", str)),
    "json_schema": _schema,
    "any_text": lambda form, draws: "" if form.get("excludes") else words(draws, 0, int(form.get("max_chars") or 1 << 10)),
    "regex": lambda form, draws: Pattern(_field(form, "pattern", str)).draw(draws),
    "sequence": lambda form, draws: "".join(_form(one, draws) for one in _field(form, "elements", list)),
    "tag": _tag,
    "triggered_tags": _triggered,
}
KINDS: dict[str, Callable[[Any, Draws], str]] = {
    "json": draw_json,
    "json_object": _object,
    "choice": _choice,
    "regex": _regex,
    "structural_tag": _tags,
}
