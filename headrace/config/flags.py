"""Flags, made from the table of settings, and the settings they give."""

from __future__ import annotations

import argparse
import os
from typing import Any

from headrace.config.catalogue import Command, Setting, settings_of
from headrace.config.settings import Settings, load

_SECTIONS = {
    "nats": "NATS connection",
    "log": "logging",
    "server": "embedded NATS server",
    "up": "supervision",
    "frontend": "HTTP frontend",
    "worker": "worker and engine",
    "router": "router",
}


def read_settings(parsed: argparse.Namespace, command: Command) -> Settings:
    """The settings of a parsed command line. Raises SettingsError."""
    given = vars(parsed)
    flags = {setting.key: given.get(setting.dest) for setting in settings_of(command)}
    return load(command, flags=flags, environ=os.environ, config=given.get("config"))


def add_setting_flags(parser: argparse.ArgumentParser, command: Command) -> None:
    """One flag for each setting of `command` that has one, grouped by section, and --config."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file with settings (default: headrace.toml if it is there)",
    )
    groups: dict[str, Any] = {}
    for setting in settings_of(command):
        if not setting.flag:
            continue
        section = setting.key.partition(".")[0]
        if section in _SECTIONS and section not in groups:
            groups[section] = parser.add_argument_group(_SECTIONS[section])
        groups.get(section, parser).add_argument(setting.flag, **_flag_options(setting))


def _flag_options(setting: Setting) -> dict[str, Any]:
    shown = (
        f"{setting.help} [{_default_text(setting)}; {setting.env}]"
        if _default_text(setting)
        else f"{setting.help} [{setting.env}]"
    )
    # An absent flag leaves no attribute: defaults are the settings' business, and a nested command must not undo its parent's.
    options: dict[str, Any] = {"dest": setting.dest, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
    if setting.kind == "switch":
        return {**options, "action": argparse.BooleanOptionalAction}
    if setting.kind == "table":
        return {**options, "action": "append", "metavar": setting.metavar}
    metavar = setting.metavar or {
        "choice": "|".join(setting.choices),
        "seconds": "SECONDS",
        "integer": "N",
        "path": "PATH",
    }.get(setting.kind, "TEXT")
    return {**options, "metavar": metavar}


def _default_text(setting: Setting) -> str:
    if setting.default in (None, (), {}):
        return ""
    if setting.kind == "switch":
        return f"default: {'on' if setting.default else 'off'}"
    return f"default: {setting.default:g}" if setting.kind == "seconds" else f"default: {setting.default}"
