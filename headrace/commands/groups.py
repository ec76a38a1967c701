"""Parsers of commands that have actions, such as `headrace dlq ls`, and the help and version flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from headrace.base.errors import EXIT_USAGE


class ShowVersion(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        from importlib.metadata import version

        sys.stdout.write(f"headrace {version('headrace')}\n")
        parser.exit()


class ShowUsualHelp(argparse.Action):
    """The flag `--help` of a command with many options. `rare` are those that it leaves out."""

    rare: Collection[argparse.Action] = ()

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        for action in self.rare:
            action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def add_help_flags(parser: argparse.ArgumentParser, options: Collection[argparse.Action], *, usual: Collection[str]) -> None:
    """Add both flags. `options` are all of the settings' flags, `usual` the names of those that `--help` shows."""
    rare = [action for action in options if not set(usual).intersection(action.option_strings)]
    text = f"show this help, which leaves out {len(rare)} rarer options"
    shown = parser.add_argument("-h", "--help", action=ShowUsualHelp, nargs=0, default=argparse.SUPPRESS, help=text)
    shown.rare = rare  # type: ignore[attr-defined]
    parser.add_argument("--help-all", action="help", default=argparse.SUPPRESS, help="show all options")


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
