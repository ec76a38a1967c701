"""Makes the flags of a command from the declared settings, and reads the settings that its flags give."""

from __future__ import annotations

import argparse
import os
from typing import Any

from headrace.config.options import SECTIONS, Command, Option, options_of
from headrace.config.secrets import hide_arguments
from headrace.config.settings import Settings, load


def read_settings(parsed: argparse.Namespace, command: Command) -> Settings:
    """Return the settings of a parsed command line. Raises SettingsError."""
    given = vars(parsed)
    options = options_of(command)
    hide_arguments(options)
    flags = {option.key: given.get(option.dest) for option in options}
    return load(command, flags=flags, environ=os.environ, config=given.get("config"))


def add_setting_flags(parser: argparse.ArgumentParser, command: Command) -> list[argparse.Action]:
    """Add --config and a flag for each setting of `command` that has one, grouped by section. Returns what was added."""
    config = parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file with settings (default: headrace.toml if it is there)",
    )
    added = [config]
    groups: dict[str, Any] = {}
    for option in options_of(command):
        if not option.flag:
            continue
        section = option.key.rpartition(".")[0]
        if section and section not in groups:
            groups[section] = parser.add_argument_group(SECTIONS[section].title)
        flags = [*filter(None, [option.setting.short]), option.flag]
        added.append(groups.get(section, parser).add_argument(*flags, **_flag_options(option)))
    return added


def _flag_options(option: Option) -> dict[str, Any]:
    shown = (
        f"{option.setting.help} [{_default_text(option)}; {option.env}]"
        if _default_text(option)
        else f"{option.setting.help} [{option.env}]"
    )
    # An absent flag leaves no attribute: defaults are the settings' business, and a nested command must not undo its parent's.
    options: dict[str, Any] = {"dest": option.dest, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
    if option.kind == "switch":
        return {**options, "action": argparse.BooleanOptionalAction}
    if option.kind == "table":
        return {**options, "action": "append", "metavar": option.setting.metavar}
    metavar = option.setting.metavar or {
        "choice": "|".join([*option.choices, *filter(None, [option.setting.other])]),
        "seconds": "SECONDS",
        "integer": "N",
        "path": "PATH",
    }.get(option.kind, "TEXT")
    return {**options, "metavar": metavar}


def _default_text(option: Option) -> str:
    if option.default in (None, (), {}):
        return ""
    if option.kind == "switch":
        return f"default: {'on' if option.default else 'off'}"
    return f"default: {option.default:g}" if option.kind == "seconds" else f"default: {option.default}"
