"""Structural tags: free text mixed with pieces whose form is given by their opening tag.

Both notations are read: `{"type": "structural_tag", "format": …}` and the older `{"structures": […], "triggers": […]}`. Where
tags are optional, some texts have one and some have none; where any text is allowed, a few words are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.workers.sim.answers.guided.draws import Draws
from headrace.workers.sim.answers.guided.errors import Unsupported
from headrace.workers.sim.answers.guided.formats import words
from headrace.workers.sim.answers.guided.json_text import draw_json, parse_json
from headrace.workers.sim.answers.guided.pattern import Pattern

_MOST_REPEATED = 64


class Tags:
    """Draws texts that a structural tag allows."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def text(self, given: Any) -> str:
        """Draw a text. Raises NoInstance, and Unsupported naming what is wrong or not supported."""
        tag = parse_json(given)
        if not isinstance(tag, Mapping):
            raise Unsupported(f"it must be an object, not {tag!r}")
        if "structures" in tag:
            return self._draw_older_notation(tag)
        return self._draw(tag.get("format"))

    def _draw_older_notation(self, tag: Mapping[str, Any]) -> str:
        tags = [
            {
                "begin": _field(item, "begin", str),
                "content": {"type": "json_schema", "json_schema": parse_json(_field(item, "schema", object))},
                "end": _field(item, "end", str),
            }
            for item in _field(tag, "structures", list)
        ]
        return self._triggered({"tags": tags, "triggers": tag.get("triggers", [])})

    def _draw(self, given: Any) -> str:
        makers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda form: str(_field(form, "value", str)),
            "json_schema": self._schema,
            "any_text": self._any_text,
            "regex": lambda form: Pattern(_field(form, "pattern", str)).draw(self._draws),
            "sequence": lambda form: "".join(map(self._draw, _field(form, "elements", list))),
            "or": lambda form: self._draw(self._draws.pick(_non_empty(form, "elements"))),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "optional": lambda form: self._repeated(form, self._draws.below(2)),
            "plus": lambda form: self._repeated(form, 1 + self._draws.below(3)),
            "star": lambda form: self._repeated(form, self._draws.below(3)),
            "repeat": self._repeat,
        }
        kind = _field(given, "type", str)
        if kind not in makers:
            raise Unsupported(f"the simulator does not know the format {kind!r}; it knows {', '.join(makers)}")
        return makers[kind](given)

    def _schema(self, form: Mapping[str, Any]) -> str:
        style = form.get("style") or "json"
        if style != "json":
            raise Unsupported(f"the simulator does not write json_schema in the style {style!r}, only 'json'")
        return draw_json(_field(form, "json_schema", object), self._draws)

    def _any_text(self, form: Mapping[str, Any]) -> str:
        most = form.get("max_chars")
        text = words(self._draws, 0, 1 << 10 if most is None else int(most))
        if any(banned in text for banned in form.get("excludes") or ()):
            return ""
        return text

    def _tag(self, form: Any) -> str:
        end = _field(form, "end", object)
        if isinstance(end, list) and end:
            end = self._draws.pick(end)
        begin = _field(form, "begin", object)
        if not isinstance(begin, str) or not isinstance(end, str):
            raise Unsupported("the simulator knows tags that begin and end with texts, not with tokens")
        return f"{begin}{self._draw(_field(form, 'content', object))}{end}"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        tags = _non_empty(form, "tags")
        must, once = bool(form.get("at_least_one")), bool(form.get("stop_after_first"))
        text = "" if must else self._outside_text(form)
        count = int(must) if must or self._draws.one_in(4) else 1
        if not once:
            count += self._draws.one_in(4)
        for _ in range(count):
            text += self._tag(self._draws.pick(tags))
            if not once:
                text += self._outside_text(form) if self._draws.one_in(4) else ""
        return text

    def _outside_text(self, form: Mapping[str, Any]) -> str:
        """Draw text outside of the tags that opens none of them."""
        text = words(self._draws, 0, 64)
        banned = [*_field(form, "triggers", list), *(form.get("excludes") or ())]
        return "" if any(str(trigger)[:1] in text for trigger in banned) else text

    def _separated(self, form: Mapping[str, Any]) -> str:
        tags = _non_empty(form, "tags")
        count = int(bool(form.get("at_least_one"))) or self._draws.below(2)
        if count and not form.get("stop_after_first"):
            count += self._draws.one_in(4)
        separator: str = _field(form, "separator", str)
        return separator.join(self._tag(self._draws.pick(tags)) for _ in range(count))

    def _repeat(self, form: Mapping[str, Any]) -> str:
        least, most = _field(form, "min", int), _field(form, "max", int)
        most = least + 2 if most < 0 else most
        if not 0 <= least <= most or least > _MOST_REPEATED:
            raise Unsupported(f"repeat from {least} to {most}; the most are {_MOST_REPEATED}")
        return self._repeated(form, least + self._draws.below(min(most - least, 3) + 1))

    def _repeated(self, form: Mapping[str, Any], times: int) -> str:
        return "".join(self._draw(_field(form, "content", object)) for _ in range(times))


def _field(form: Any, name: str, kind: type) -> Any:
    if not isinstance(form, Mapping) or name not in form:
        raise Unsupported(f"{form!r} needs the field {name!r}")
    if not isinstance(form[name], kind):
        raise Unsupported(f"{name}={form[name]!r} has the wrong type")
    return form[name]


def _non_empty(form: Any, name: str) -> list[Any]:
    found = _field(form, name, list)
    if not found:
        raise Unsupported(f"{name} is empty")
    return list(found)
