"""Adds the commands for models, settings and versions to the command line."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from headrace.cli.adapters import add_model_commands
from headrace.commands.groups import add_group
from headrace.config.flags import add_setting_flags, read_settings


def add_model(commands: Any, about: str) -> None:
    """Add `headrace model` and its actions."""
    actions = add_group(commands, "model", about=about)
    prepare = actions.add_parser(
        "prepare",
        help="download and convert the bundled small chat model, if that was not done yet",
        description="Make the bundled small chat model ready in <data-dir>/models and print its folder.",
        allow_abbrev=False,
    )
    add_setting_flags(prepare, "model")
    prepare.set_defaults(run=_run_model_prepare, prog="headrace model prepare")
    add_model_commands(actions)


def add_config(commands: Any, about: str) -> None:
    """Add `headrace config`."""
    config = commands.add_parser(
        "config",
        help=about,
        description="Show the settings in force for a command, secrets masked, as TOML with the source of each value.",
        allow_abbrev=False,
    )
    config.add_argument(
        "command", nargs="?", choices=("up", "frontend", "worker", "router", "streams"), default="up", help="default: up"
    )
    config.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    shown = config.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="as JSON: key → value and source")
    shown.add_argument("--markdown", action="store_true", help="the settings of all commands and their defaults, as tables")
    config.set_defaults(run=_run_config, prog="headrace config")


def add_version(commands: Any, about: str) -> None:
    """Add `headrace version`."""
    version = commands.add_parser("version", help=about, allow_abbrev=False)
    version.add_argument("--json", action="store_true", help="as JSON")
    version.set_defaults(run=_run_version, prog="headrace version")


def _run_model_prepare(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_model_prepare

    return run_model_prepare(read_settings(parsed, "model"))


def _run_config(parsed: argparse.Namespace) -> int:
    from headrace.commands.info import settings_markdown, show_config

    if parsed.markdown:
        sys.stdout.write(settings_markdown())
        return 0
    sys.stdout.write(show_config(read_settings(parsed, parsed.command), as_json=parsed.json))
    return 0


def _run_version(parsed: argparse.Namespace) -> int:
    from headrace.commands.info import show_versions

    sys.stdout.write(show_versions(as_json=parsed.json))
    return 0
