"""Reads settings: flags, then the environment, then a TOML file, then defaults.

Each value is validated once; an error names the key, its value and where it came from.

    settings = load("worker", flags={"worker.engine": "sim"}, environ=os.environ)
    settings["worker.engine"]           # "sim"
    settings.source("worker.engine")    # "--engine"

Tables (`worker.engine_args`) are merged key by key over all sources; everything else is taken whole from the first source
that has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.options import (
    OTHER_ENV,
    SECTIONS,
    Command,
    Option,
    all_options,
    find,
    find_variable,
    options_of,
    section_options,
)
from headrace.errors import SettingsError

DEFAULT_FILE = "headrace.toml"
MASK = "********"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_URL_PASSWORD = re.compile(r"(\w+://)([^/@\s]+)@")
_SECRET_WORDS = ("password", "token", "secret", "api_key")
_INTEGER = re.compile(r"-?\d+\Z")


class Value(NamedTuple):
    """A valid value and where it came from: a flag, a variable, a file, or "default"."""

    value: Any
    source: str


class Settings:
    """All settings of one command, valid. `file` is the TOML file that was read, if any."""

    def __init__(
        self, command: Command, given: Mapping[str, Value], file: Path | None = None, warnings: tuple[str, ...] = ()
    ) -> None:
        self.command = command
        self.file = file
        self.warnings = warnings
        self._given = given

    def __getitem__(self, key: str) -> Any:
        """Return the value. Raises KeyError for a key that is no setting."""
        if (value := self._given.get(key)) is not None:
            return value.value
        if (option := find(key)) is None:
            raise KeyError(key)
        return option.default

    def source(self, key: str) -> str:
        """Return where the value came from."""
        return self._given[key].source if key in self._given else "default"

    def given(self, key: str) -> bool:
        """Return True unless the setting has its default."""
        return key in self._given

    def masked(self) -> dict[str, Any]:
        """Return key → value of the settings that the command uses and that have not their default, secrets masked."""
        return {o.key: mask(o, self[o.key]) for o in options_of(self.command) if self.given(o.key)}

    def environment(self) -> dict[str, str]:
        """Return environment variables for a child process: what flags gave here. The child finds the rest by itself."""
        variables = {"HEADRACE_CONFIG": str(self.file.resolve())} if self.file else {}
        for key, value in self._given.items():
            option = find(key)
            if option is not None and value.source.startswith("--") and value.value is not None:
                variables[option.env] = as_text(option, value.value)
        return variables


def load(
    command: Command,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    folder: Path | None = None,
) -> Settings:
    """Return the settings of `command`. `flags` maps keys to the texts given on the command line; None means not given.

    `config` names the TOML file, else HEADRACE_CONFIG does, else `headrace.toml` in `folder` (the current directory) is
    read if it is there. Values of settings that the command does not use are checked, too. Raises SettingsError.
    """
    environ = environ or {}
    file, table = _read_file(config, environ, folder or Path())
    by_variable, warnings = _read_variables(environ)
    sources: list[Mapping[str, tuple[str, Any]]] = [
        {key: (_flag(key), raw) for key, raw in (flags or {}).items() if raw is not None},
        by_variable,
        {key: (str(file), raw) for key, raw in table.items()},
    ]
    keys = {key for found in sources for key in found}
    sections = {key.rpartition(".")[0] for key in keys}
    given = {
        option.key: _resolve(option, [found[option.key] for found in sources if option.key in found])
        for section in SECTIONS
        if section in sections
        for option in section_options(section)
        if option.key in keys
    }
    return Settings(command, given, file, tuple(warnings))


def mask(option: Option, value: Any) -> Any:
    """Return the value as it may be shown."""
    if value is None:
        return None
    if option.setting.secret:
        return MASK
    if option.kind == "table":
        return {key: MASK if any(word in key.lower() for word in _SECRET_WORDS) else item for key, item in value.items()}
    if option.kind == "list":
        return [mask_url(item) for item in value]
    return value


def mask_url(url: str) -> str:
    """Return an address with its user and password masked."""
    return _URL_PASSWORD.sub(rf"\1{MASK}@", url)


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


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split `key=value` into key and value, the value read as JSON when it is JSON. Raises ValueError."""
    key, equals, raw = text.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key:
        raise ValueError("expected KEY=VALUE")
    try:
        return key, json.loads(raw)
    except ValueError:
        return key, raw


# -- one value ---------------------------------------------------------------------------------------------------------------


def _resolve(option: Option, candidates: list[tuple[str, Any]]) -> Value:
    checked = [Value(_check(option, raw, source), source) for source, raw in candidates]
    if option.kind == "table":
        merged: dict[str, Any] = {}
        for value in reversed(checked):
            merged.update(value.value)
        return Value(merged, checked[0].source)
    return checked[0]


def _check(option: Option, raw: Any, source: str) -> Any:
    """Return `raw` in the setting's type. Text is converted; anything else (from TOML) must have the type already."""
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
            return _table(raw)


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


def _table(raw: Any) -> dict[str, Any]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ValueError('expected a JSON object, for example {"max_model_len": 2048}') from None
    if isinstance(raw, list):  # repeated KEY=VALUE flags
        return dict(parse_assignment(item) for item in raw)
    if not isinstance(raw, dict):
        raise TypeError("expected a table")
    return raw


# -- sources -----------------------------------------------------------------------------------------------------------------


def _read_file(config: str | None, environ: Mapping[str, str], folder: Path) -> tuple[Path | None, dict[str, Any]]:
    named = config or environ.get("HEADRACE_CONFIG")
    file = Path(named) if named else folder / DEFAULT_FILE
    if not named and not file.is_file():
        return None, {}
    import tomllib

    try:
        with file.open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        origin = "--config" if config else "HEADRACE_CONFIG" if named else DEFAULT_FILE
        raise SettingsError(f"cannot read the settings file {file} ({origin}): {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {file} is not TOML: {error}") from None
    return file, _flatten(content, file)


def _flatten(content: Mapping[str, Any], file: Path, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if find(key) is not None:
            flat[key] = value
        elif isinstance(value, dict) and key in SECTIONS:
            flat.update(_flatten(value, file, f"{key}."))
        else:
            known = [option.key for option in all_options()]
            raise SettingsError(f"{file}: unknown setting {key!r}{close_matches(key, known)}")
    return flat


def _flag(key: str) -> str:
    option = find(key)
    return (option.flag if option else "") or key


def _read_variables(environ: Mapping[str, str]) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Return key → variable and its text, and a warning for each variable of ours that is no setting."""
    found: dict[str, tuple[str, Any]] = {}
    warnings = []
    for name, raw in sorted(environ.items()):
        if not name.startswith("HEADRACE_") or name in OTHER_ENV:
            continue
        option = find_variable(name)
        if option is None:
            known = [*(option.env for option in all_options()), *OTHER_ENV]
            warnings.append(f"unknown environment variable {name}{close_matches(name, known)}")
        elif raw != "":
            found[option.key] = (name, raw)
    return found, warnings
