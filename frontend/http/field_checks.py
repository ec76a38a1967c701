"""What a request must have, and of which type: parts of it are mappings, and what they may be depends on theirs.

Errors name the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.frontend.errors import BadRequest
from headrace.frontend.ports import Models


def text_at(value: Mapping[str, Any], key: str, where: str) -> str:
    """Raises BadRequest when it is missing or no string."""
    param = f"{where}.{key}"
    text = value.get(key)
    if text is None:
        raise missing(param)
    if not isinstance(text, str):
        raise wrong(param, "a string")
    return text


def mapping_at(value: Any, where: str) -> Mapping[str, Any]:
    """Raises BadRequest when it is missing or no object."""
    if value is None:
        raise missing(where)
    if not isinstance(value, Mapping):
        raise wrong(where, "an object")
    return value


def list_at(value: Any, where: str) -> Sequence[Any]:
    """Raises BadRequest when it is no list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(where, "a list")
    return value


def model_name(name: str | None, models: Models) -> str:
    """The only one there is where the request names none. Raises BadRequest when there are others, or none at all."""
    if name is not None:
        return name
    names = models.names()
    if len(names) != 1:
        raise missing("model", f", one of: {', '.join(names) or 'nothing'}")
    return names[0]


def missing(param: str, more: str = "") -> BadRequest:
    """The error for a parameter that must be there. `more` ends the message."""
    return BadRequest(f"missing required parameter: {param}{more}", param=param, code="missing_required_parameter")


def wrong(param: str, wanted: str) -> BadRequest:
    """The error for a value of the wrong type."""
    return BadRequest(f"invalid value for {param}: expected {wanted}", param=param)


def unsupported(param: str, why: str = "is not supported here") -> BadRequest:
    """The error for something Headrace knows of and does not do."""
    return BadRequest(f"{param} {why}", param=param, code="unsupported_parameter")
