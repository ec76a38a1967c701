"""Adds `headrace console` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli import help_texts
from headrace.config.flags import add_setting_flags


def add_console(commands: Any, about: str) -> None:
    """Add `console`."""
    parser = commands.add_parser(
        "console",
        help=about,
        description="Serve the console: a deployment in a browser, live, at /console.",
        epilog=help_texts.CONSOLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_setting_flags(parser, "console")
    parser.set_defaults(run=_run, prog="headrace console")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.commands.running_deployment import located_settings
    from headrace.console.command import run_console_command

    return run_console_command(located_settings(parsed, "console"))
