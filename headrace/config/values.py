"""Checks and converts the value of one setting, and shows it with secrets masked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from headrace.base.errors import SettingsError
from headrace.config.options import Option
from headrace.config.secrets import MASK, mask_table, mask_url, mask_urls

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_INTEGER = re.compile(r"-?\d+\Z")


def check_value(option: Option, raw: Any, source: str) -> Any:
    """Return `raw` in the setting's type. Text is converted; anything else (from TOML) must have the type already.

    Raises SettingsError naming the key, the value and its source.
    """
    try:
        value = _convert(option, raw)
    except (ValueError, TypeError) as error:
        shown = mask(option, raw) if option.setting.secret else raw
        raise SettingsError(f"{option.key} = {shown!r} ({source}): {error}") from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if option.setting.least is not None and value < option.setting.least:
            raise SettingsError(f"{option.key} = {raw!r} ({source}): the least is {option.setting.least:g}")
        if option.setting.most is not None and value > option.setting.most:
            raise SettingsError(f"{option.key} = {raw!r} ({source}): the most is {option.setting.most:g}")
    return value


def _convert(option: Option, raw: Any) -> Any:
    match option.kind:
        case "text" | "path":
            return _text(raw)
        case "choice":
            if raw not in option.choices and not (option.setting.other and isinstance(raw, str) and ":" in raw):
                other = f", or {option.setting.other}" if option.setting.other else ""
                close = close_matches(str(raw), option.choices)
                raise ValueError(f"expected one of {', '.join(option.choices)}{other}{close}")
            return raw
        case "integer":
            return _integer(raw)
        case "seconds" | "number":
            return _number(raw, "seconds" if option.kind == "seconds" else "a number")
        case "switch":
            return _switch(raw)
        case "list":
            return _list(raw)
        case "table":
            return _table(raw, names=option.setting.names)


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw:
        raise TypeError("expected a text that is not empty")
    return raw


def _integer(raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and _INTEGER.match(raw.strip()):
        return int(raw)
    raise TypeError("expected a whole number")


def _number(raw: Any, what: str) -> float:
    try:
        if isinstance(raw, bool):
            raise TypeError
        value = float(raw)
    except (TypeError, ValueError):
        raise TypeError(f"expected {what} as a number, for example 2.5") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("expected a finite number")
    return value


def _switch(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise TypeError("expected true or false")


def _list(raw: Any) -> tuple[str, ...]:
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise TypeError("expected a list of texts, or texts separated by commas")
    return tuple(item.strip() for item in items if item.strip())


def _table(raw: Any, *, names: bool) -> dict[str, Any]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ValueError('expected a JSON object, for example {"max_model_len": 2048}') from None
    if isinstance(raw, list):  # repeated KEY=VALUE flags
        return dict(parse_assignment(item, names=names) for item in raw)
    if not isinstance(raw, dict):
        raise TypeError("expected a table")
    return raw


def mask(option: Option, value: Any) -> Any:
    """Return the value as it may be shown."""
    if value is None:
        return None
    if option.setting.secret:
        return MASK if value else value
    if option.kind == "table":
        return mask_table(value)
    if option.kind == "list":
        return mask_urls(value)
    return mask_url(value) if isinstance(value, str) and "://" in value else value


def as_text(option: Option, value: Any) -> str:
    """Return the value as an environment variable would give it."""
    if option.kind == "list":
        return ",".join(value)
    if option.kind == "table":
        return json.dumps(value)
    if option.kind == "switch":
        return "true" if value else "false"
    return str(value)


def close_matches(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with similar names, or an empty text."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def parse_assignment(text: str, *, names: bool = False) -> tuple[str, Any]:
    """Split `key=value` into key and value, the value read as JSON when it is JSON. Raises ValueError.

    A hyphen in a key becomes `_`, unless keys are `names` from outside.
    """
    key, equals, raw = text.partition("=")
    key = key.strip() if names else key.strip().replace("-", "_")
    if not equals or not key:
        raise ValueError("expected KEY=VALUE")
    try:
        return key, json.loads(raw)
    except ValueError:
        return key, raw
