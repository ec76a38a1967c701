"""Bounds how much longer one operation of a template may make a text: what would be over the limit on prompts raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError

MAX_CHARS = 64 * 1024 * 1024  # of a rendered prompt; twice the largest body, by default
MAX_WIDTH = 10_000  # to which a text is padded, or into which parts it is cut
MAX_INDENT = 256  # before each of the lines of a text

_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0 +-]*(?:\d{5,}|\*|\d*\.(?:\d{5,}|\*))")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5,}|\{)")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_FILTERS = {"indent": MAX_INDENT, "tojson": MAX_INDENT} | dict.fromkeys(
    ("center", "slice", "batch", "wordwrap", "truncate", "round", "urlize"), MAX_WIDTH
)


def check_size(size: int) -> None:
    """Raise SecurityError for a text or list that is larger than any prompt."""
    if size > MAX_CHARS:
        raise SecurityError("a text longer than any prompt")


def check_percent(text: object) -> None:
    """Raise SecurityError for a format of the operator `%` that pads to an excessive width."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if isinstance(text, str) and _WIDE_PERCENT.search(text):
        raise SecurityError("a format with an excessive width")


def check_method(owner: str | bytes, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise SecurityError for a call of a text's method whose result would be larger than any prompt."""
    if name in _PADDING:
        _check_numbers((*args, *named.values()), MAX_WIDTH)
    elif name in ("format", "format_map"):
        if isinstance(owner, str) and _WIDE_FORMAT.search(owner):
            raise SecurityError("a format with an excessive width")
    elif name == "replace" and len(args) >= 2 and all(isinstance(arg, type(owner)) for arg in args[:2]):
        check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], Sized):
        check_size(len(owner) * len(args[0]))
    elif name == "translate":
        raise SecurityError("translate is not for prompts")


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that raises SecurityError for arguments with which its result would be excessive."""
    most = _FILTERS.get(name)
    if name == "format":

        @wraps(function)
        def formatting(*args: Any, **named: Any) -> Any:
            check_percent(args[0] if args else "")
            return function(*args, **named)

        return formatting
    if name == "replace":

        @wraps(function)
        def replacing(*args: Any, **named: Any) -> Any:
            texts = [arg for arg in args if isinstance(arg, str)]
            if len(texts) >= 3:
                check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
            return function(*args, **named)

        return replacing
    if most is None:
        return function

    @wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        _check_numbers((*args[1:], *named.values()), most)
        return function(*args, **named)

    return bounded


def _check_numbers(values: Sequence[Any], most: int) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > most:
            raise SecurityError(f"{value} is more than {most}")
