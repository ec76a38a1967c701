"""Reads settings: flags, then the environment, then a TOML file, then defaults.

Each value is validated once; an error names the key, its value and where it came from.

    settings = load("worker", flags={"worker.engine": "sim"}, environ=os.environ)
    settings["worker.engine"]           # "sim"
    settings.source("worker.engine")    # "--engine"

A worker that belongs to a pool of `headrace up` by name (`worker.pool`) has that pool's settings after its flags.
Tables (`worker.engine_args`) are merged key by key over all sources; everything else is taken whole from the first source
that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.base.errors import SettingsError
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
from headrace.config.values import NOT_SHARED, POOL, POOLS, as_text, check_value, close_matches, mask, values_of_pool

DEFAULT_FILE = "headrace.toml"


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
        return self._given[key].source if key in self._given else "default"

    def given(self, key: str) -> bool:
        return key in self._given

    def completed(self, values: Mapping[str, Any], source: str) -> Settings:
        """Return these settings with `values` for the keys that were not given. `source` is where the values are from."""
        more = {key: Value(value, source) for key, value in values.items() if not self.given(key)}
        return Settings(self.command, {**more, **self._given}, self.file, self.warnings)

    def of_pool(self, name: str) -> Settings:
        """Return the settings of a further pool of `headrace up`. Raises SettingsError for one that makes no sense."""
        source = f"{POOLS}.{name}"
        own = {key: Value(_checked(key, raw, source), source) for key, raw in values_of_pool(self[POOLS], name, source).items()}
        shared = {key: value for key, value in self._given.items() if key not in NOT_SHARED}
        return Settings(self.command, {**shared, **own}, self.file)

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
    if command == "worker" and (pool := _of_pool(sources)) is not None:
        sources = [sources[0], pool, *(_without(found, NOT_SHARED) for found in sources[1:])]
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


def _of_pool(sources: Sequence[Mapping[str, tuple[str, Any]]]) -> dict[str, tuple[str, Any]] | None:
    """Return what the pool gives that a worker is to belong to, by key; None for one that is to belong to none by name."""
    name = next((found[POOL] for found in sources if POOL in found), None)
    if name is None:
        return None
    option = find(POOLS)
    assert option is not None  # noqa: S101 # it is declared
    pools = _resolve(option, [found[POOLS] for found in sources if POOLS in found] or [("default", {})])
    source = f"{POOLS}.{name[1]}"
    return {key: (source, raw) for key, raw in values_of_pool(pools.value, name[1], source).items()}


def _without(found: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in keys}


def _checked(key: str, raw: Any, source: str) -> Any:
    option = find(key)
    assert option is not None  # noqa: S101 # `values_of_pool` has looked
    return check_value(option, raw, source)


def _resolve(option: Option, candidates: list[tuple[str, Any]]) -> Value:
    checked = [Value(check_value(option, raw, source), source) for source, raw in candidates]
    if option.kind == "table":
        merged: dict[str, Any] = {}
        for value in reversed(checked):
            merged.update(value.value)
        return Value(merged, checked[0].source)
    return checked[0]


def _read_file(config: str | None, environ: Mapping[str, str], folder: Path) -> tuple[Path | None, dict[str, Any]]:
    named = config or environ.get("HEADRACE_CONFIG")
    file = Path(named) if named else folder / DEFAULT_FILE
    try:
        if not named and not file.is_file():
            return None, {}
        import tomllib

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
            known = [*(option.key for option in all_options()), *SECTIONS]
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
