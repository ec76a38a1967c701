"""Checks fields of parts that are decoded as plain mappings, because their type depends on their content.

Errors name the path of the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.frontend.errors import BadRequest
from headrace.frontend.ports import Models


def text_at(value: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under `key`. Raises BadRequest if it is missing or no string."""
    param = f"{where}.{key}"
    text = value.get(key)
    if text is None:
        raise missing(param)
    if not isinstance(text, str):
        raise wrong(param, "a string")
    return text


def mapping_at(value: Any, where: str) -> Mapping[str, Any]:
    """Return the value as an object. Raises BadRequest if it is missing or no object."""
    if value is None:
        raise missing(where)
    if not isinstance(value, Mapping):
        raise wrong(where, "an object")
    return value


def list_at(value: Any, where: str) -> Sequence[Any]:
    """Return the value as a list. Raises BadRequest if it is no list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(where, "a list")
    return value


def model_name(name: str | None, models: Models) -> str:
    """Return `name`, or the only served model if the request names none. Raises BadRequest if there is not exactly one.

    A model that had a worker lately counts as served. If there is none of these, the only known model is meant.
    """
    if name is not None:
        return name
    names = models.offered_names() or models.names()
    if len(names) != 1:
        raise missing("model", f", one of: {', '.join(names) or 'nothing'}")
    return names[0]


def missing(param: str, more: str = "") -> BadRequest:
    """Return the error for a missing required parameter. `more` ends the message."""
    return BadRequest(f"missing required parameter: {param}{more}", param=param, code="missing_required_parameter")


def wrong(param: str, wanted: str) -> BadRequest:
    return BadRequest(f"invalid value for {param}: expected {wanted}", param=param)


def unsupported(param: str, why: str = "is not supported here") -> BadRequest:
    """Return the error for a parameter that Headrace knows and does not support."""
    return BadRequest(f"{param} {why}", param=param, code="unsupported_parameter")
