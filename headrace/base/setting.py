"""Declares a setting on the field that holds it: help text, flag, range.

    idle_s: Annotated[float, Setting("An idle connection is closed after this.", flag="--idle", least=0.1)] = 75.0

A field of a settings class that an operator can set carries a `Setting`; a field without one is internal.  The command line
(`headrace/config`) derives flags, environment variables, TOML keys and documentation from these declarations.  This module
imports nothing of Headrace, so the settings of each package can use it.  A module that declares settings must be cheap to
import and evaluates its annotations (no `from __future__ import annotations`): each command reads all of them when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field
from typing import Annotated, Any, NamedTuple, get_args, get_origin


class Setting(NamedTuple):
    """The declaration of one setting, apart from its name, type and default, which are those of the field.

    Numbers lie between `least` and `most`. `kind` is "path" for the path of a file or folder, else it follows from the type. A
    secret has no flag and is masked wherever settings are shown. A choice with `other` also takes any text with a colon in it;
    `other` is its form in help texts.

    `names`: the keys of a table are names from outside, in which a hyphen stays what it is.

    `key` is the name of the setting where it differs from the field's, `commands` lists the commands that use it where not
    all commands of its section do. In help texts and documents settings follow each other as declared; `after` names the key
    behind which this field and those below it are listed instead. `short` is a second flag, of one letter.
    """

    help: str
    flag: str = ""
    least: float | None = None
    most: float | None = None
    other: str = ""
    metavar: str = ""
    kind: str = ""
    secret: bool = False
    key: str = ""
    commands: tuple[str, ...] = ()
    after: str = ""
    short: str = ""
    names: bool = False


class Declared(NamedTuple):
    """A field with its setting. `type` is the annotation without the setting; `default` is None for a required field."""

    field: str
    type: Any
    default: Any
    setting: Setting


def port_setting(help: str, flag: str = "") -> Setting:  # noqa: A002  # the name of the field of Setting
    """Declare a TCP port. 0 picks a free one."""
    return Setting(help, flag, least=0, most=65535, metavar="PORT")


def declared(settings: type) -> Iterator[Declared]:
    """Yield the settings that a dataclass or a NamedTuple declares, in the order of its fields.

    Raises TypeError for a class whose module does not evaluate its annotations.
    """
    defaults = getattr(settings, "__dataclass_fields__", None) or settings._field_defaults  # type: ignore[attr-defined]
    annotations: dict[str, Any] = settings.__annotations__
    for field, annotation in annotations.items():
        if isinstance(annotation, str):
            raise TypeError(f"{settings.__module__} must evaluate its annotations: {settings.__name__}.{field} is a text")
        if get_origin(annotation) is not Annotated:
            continue
        kind, *marks = get_args(annotation)
        for mark in marks:
            if isinstance(mark, Setting):
                yield Declared(field, kind, _default(defaults.get(field)), mark)


def check_numbers(settings: Any) -> None:
    """Check the numbers of a settings object at construction: raises ValueError naming the field and the value.

    Only what the code cannot bear is refused: numbers below zero, zero where the range begins above it, and numbers above the
    range. What an operator gives must lie within the range, which may begin higher (`headrace.config.settings`).
    """
    for name, _, _, setting in declared(type(settings)):
        value = getattr(settings, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if setting.least is not None and not (value > 0 or (value == 0 and setting.least == 0)):
            raise ValueError(f"{name} must be {'0 or more' if setting.least == 0 else 'above 0'}, got {value}")
        if setting.most is not None and value > setting.most:
            raise ValueError(f"{name} must be at most {setting.most:g}, got {value}")


def _default(default: Any) -> Any:
    if not isinstance(default, Field):
        return default
    if default.default is not MISSING:
        return default.default
    return None if default.default_factory is MISSING else default.default_factory()
