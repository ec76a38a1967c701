"""Commands that need another word after them."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_group(commands: Any, name: str, *, about: str, description: str | None = None, examples: str | None = None) -> Any:
    """A command with actions, which are added to what is returned. Alone it shows its help.

    `name` is the whole of it after `headrace`, `about` its line in the list of commands, `examples` are shown as they are.
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
    """In place of doing something."""
    parser.print_help(sys.stderr)
    return 2
