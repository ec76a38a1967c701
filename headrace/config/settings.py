"""Reading settings: flags, then the environment, then a TOML file, then defaults; validated once, with errors that name the
key, its value and where it came from.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.catalogue import BY_ENV, BY_KEY, OTHER_ENV, SETTINGS, Command, Setting
from headrace.errors import SettingsError

DEFAULT_FILE = "headrace.toml"
MASK = "********"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_URL_PASSWORD = re.compile(r"(\w+://)([^/@\s]+)@")
_SECRET_WORDS = ("password", "token", "secret", "api_key")
_INTEGER = re.compile(r"-?\d+\Z")


@dataclass(frozen=True, slots=True)
class Value:
    """A valid value and where it came from: a flag, a variable, a file, or "default"."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one command, valid. `file` is the TOML file that was read, if any."""

    command: Command
    values: Mapping[str, Value]
    file: Path | None = None
    warnings: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key].value

    def source(self, key: str) -> str:
        return self.values[key].source

    def given(self, key: str) -> bool:
        """Whether somebody set it."""
        return self.values[key].source != "default"

    def masked(self, *, all_values: bool = True) -> dict[str, Any]:
        """Key → value of the settings that the command uses (or only of those somebody set), secrets masked."""
        return {
            setting.key: mask(setting, self[setting.key])
            for setting in SETTINGS
            if self.command in setting.commands and (all_values or self.given(setting.key))
        }

    def environment(self) -> dict[str, str]:
        """Environment variables that give a child process what was given here by flags; the rest it finds by itself."""
        variables = {"HEADRACE_CONFIG": str(self.file.resolve())} if self.file else {}
        for key, value in self.values.items():
            if value.source.startswith("--") and value.value is not None:
                variables[BY_KEY[key].env] = as_text(BY_KEY[key], value.value)
        return variables


def load(
    command: Command,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    folder: Path | None = None,
) -> Settings:
    """The settings of `command`. `flags` maps keys to the texts given on the command line; None means not given.

    `config` names the TOML file, else HEADRACE_CONFIG does, else `headrace.toml` in `folder` (the current directory) is
    read if it is there. Raises SettingsError.
    """
    environ = environ or {}
    file, table = _read_file(config, environ, folder or Path())
    sources: list[tuple[str, Mapping[str, tuple[str, Any]]]] = [
        ("flag", {key: (BY_KEY[key].flag or key, raw) for key, raw in (flags or {}).items() if raw is not None}),
        ("environment", {BY_ENV[name].key: (name, raw) for name, raw in environ.items() if name in BY_ENV and raw != ""}),
        ("file", {key: (str(file), raw) for key, raw in table.items()}),
    ]
    values = {
        setting.key: _resolve(setting, [found[setting.key] for _, found in sources if setting.key in found])
        for setting in SETTINGS
    }
    return Settings(command, values, file, tuple(_unknown_variables(environ)))


def mask(setting: Setting, value: Any) -> Any:
    """The value as it may be shown."""
    if value is None:
        return None
    if setting.secret:
        return MASK
    if setting.kind == "table":
        return {key: MASK if any(word in key.lower() for word in _SECRET_WORDS) else item for key, item in value.items()}
    if setting.kind == "list":
        return [mask_url(item) for item in value]
    return value


def mask_url(url: str) -> str:
    """The address without the user and password in it."""
    return _URL_PASSWORD.sub(rf"\1{MASK}@", url)


def as_text(setting: Setting, value: Any) -> str:
    """The value as an environment variable would give it."""
    if setting.kind == "list":
        return ",".join(value)
    if setting.kind == "table":
        return json.dumps(value)
    if setting.kind == "switch":
        return "true" if value else "false"
    return str(value)


def close_matches(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` or nothing."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def parse_assignment(text: str) -> tuple[str, Any]:
    """`key=value` → (key, value), the value read as JSON when it is JSON. Raises ValueError."""
    key, equals, raw = text.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key:
        raise ValueError("expected KEY=VALUE")
    try:
        return key, json.loads(raw)
    except ValueError:
        return key, raw


# -- one value ---------------------------------------------------------------------------------------------------------------


def _resolve(setting: Setting, candidates: list[tuple[str, Any]]) -> Value:
    checked = [Value(_check(setting, raw, source), source) for source, raw in candidates]
    if not checked:
        return Value(setting.default, "default")
    if setting.kind == "table":
        merged: dict[str, Any] = {}
        for value in reversed(checked):
            merged.update(value.value)
        return Value(merged, checked[0].source)
    return checked[0]


def _check(setting: Setting, raw: Any, source: str) -> Any:
    """`raw` in the setting's type. Text is converted; anything else (from TOML) must have the type already."""
    try:
        value = _convert(setting, raw)
    except (ValueError, TypeError) as error:
        shown = mask(setting, raw) if setting.secret else raw
        raise SettingsError(f"{setting.key} = {shown!r} ({source}): {error}") from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if setting.least is not None and value < setting.least:
            raise SettingsError(f"{setting.key} = {raw!r} ({source}): the least is {setting.least:g}")
        if setting.most is not None and value > setting.most:
            raise SettingsError(f"{setting.key} = {raw!r} ({source}): the most is {setting.most:g}")
    return value


def _convert(setting: Setting, raw: Any) -> Any:
    match setting.kind:
        case "text" | "path":
            return _text(raw)
        case "choice":
            if raw not in setting.choices:
                raise ValueError(f"expected one of {', '.join(setting.choices)}{close_matches(str(raw), setting.choices)}")
            return raw
        case "integer":
            return _integer(raw)
        case "seconds" | "number":
            return _number(raw, "seconds" if setting.kind == "seconds" else "a number")
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
        if key in BY_KEY:
            flat[key] = value
        elif isinstance(value, dict) and any(known.startswith(f"{key}.") for known in BY_KEY):
            flat.update(_flatten(value, file, f"{key}."))
        else:
            raise SettingsError(f"{file}: unknown setting {key!r}{close_matches(key, BY_KEY)}")
    return flat


def _unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    for name in sorted(environ):
        if name.startswith("HEADRACE_") and name not in BY_ENV and name not in OTHER_ENV:
            yield f"unknown environment variable {name}{close_matches(name, [*BY_ENV, *OTHER_ENV])}"
