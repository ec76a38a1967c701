"""Adds `headrace planner` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli import help_texts
from headrace.config.flags import add_setting_flags


def add_planner(commands: Any, about: str) -> None:
    """Add `planner`."""
    parser = commands.add_parser(
        "planner",
        help=about,
        description="Plan how many workers of each role every pool needs, and say so; with --mode act start and drain them.",
        epilog=help_texts.PLANNER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_setting_flags(parser, "planner")
    parser.set_defaults(run=_run, prog="headrace planner")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.commands.running_deployment import located_settings
    from headrace.planner.command import run_planner_command

    return run_planner_command(located_settings(parsed, "planner"))
