"""Structured output by kind: a text that satisfies a request's constraint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.answers.guided.schema import draw_json, parse_json
from headrace.workers.sim.answers.guided.strings import Draws, NoInstance, Pattern, Unsupported, words

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
