"""Checks values of an engine's settings against annotations of plain types, as an engine's source has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.workers.errors import EngineStartFailed

_PLAIN = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_OPTIONAL = re.compile(r"Optional\[(\w+)\]\Z")


def check_plain_types(engine: str, args: Mapping[str, Any], annotations: Mapping[str, str]) -> None:
    """Raise EngineStartFailed for the first value that is not of the plain type that its setting has.

    `engine` is the name in the error. Settings of other types, and without an annotation, pass.
    """
    for name, value in args.items():
        annotation = _OPTIONAL.sub(r"\1 | None", annotations.get(name, ""))
        kinds = {kind.strip() for kind in annotation.split("|")} - {"None"}
        if kinds and kinds <= _PLAIN.keys() and not _fits(value, kinds):
            wanted = " or ".join(text for kind, text in _PLAIN.items() if kind in kinds)
            raise EngineStartFailed(f"{engine} takes {wanted} as {name}, not {value!r}")


def json_as_text(args: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with objects and lists written as JSON where the engine takes text and nothing else.

    An engine reads such a setting from its command line, as text; the value of `--engine-arg` was read as JSON before.
    """
    return {
        name: json.dumps(value) if isinstance(value, dict | list) and _is_text(annotations.get(name, "")) else value
        for name, value in args.items()
    }


def _is_text(annotation: str) -> bool:
    return {kind.strip() for kind in _OPTIONAL.sub(r"\1", annotation).split("|")} - {"None"} == {"str"}


def _fits(value: Any, kinds: set[str]) -> bool:
    if value is None:
        return True
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return value in (0, 1) or bool(kinds & {"int", "float"})
    return isinstance(value, float) and ("float" in kinds or value.is_integer())
