"""Structured output by kind: a text that satisfies a request's constraint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.answers.guided.draws import Draws
from headrace.workers.sim.answers.guided.errors import NoInstance, Unsupported
from headrace.workers.sim.answers.guided.json_text import draw_json
from headrace.workers.sim.answers.guided.pattern import Pattern
from headrace.workers.sim.answers.guided.tags import Tags

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
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(one, str) for one in given):
        raise Unsupported(f"it must be a list of texts, not {given!r}")
    return str(draws.pick(given))


def _regex(given: Any, draws: Draws) -> str:
    if not isinstance(given, str):
        raise Unsupported(f"it must be a text, not {given!r}")
    return Pattern(given).draw(draws)


def _tags(given: Any, draws: Draws) -> str:
    return Tags(draws).text(given)


KINDS: dict[str, Callable[[Any, Draws], str]] = {
    "json": draw_json,
    "json_object": _object,
    "choice": _choice,
    "regex": _regex,
    "structural_tag": _tags,
}
