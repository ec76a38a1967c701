"""Adds commands that have actions, such as `headrace dlq ls`, to the command line."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from headrace.base.errors import EXIT_USAGE

EXIT_CODES = (
    "exit codes: 0 clean, 1 failure, 2 wrong command line, 69 NATS server unreachable, 70 engine died, 78 wrong settings"
)


def add_group(commands: Any, name: str, *, about: str, description: str | None = None, examples: str | None = None) -> Any:
    """Add a command and return the parsers to which its actions are added. The command alone shows its help.

    `name` is all words after `headrace`, `about` its line in the list of commands, `examples` are shown as they are.
    """
    parser = commands.add_parser(
        name.rpartition(" ")[2],
        help=about,
        description=description,
        epilog=examples,
        formatter_class=argparse.HelpFormatter if examples is None else argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=lambda _parsed: show_help(parser), prog=f"headrace {name}")
    return parser.add_subparsers(metavar="ACTION", title="actions")


def show_help(parser: argparse.ArgumentParser) -> int:
    """Print the help of a command that was given without an action. Returns exit code 2."""
    parser.print_help(sys.stderr)
    return EXIT_USAGE
