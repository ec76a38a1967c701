"""Adds `--help`, which shows the usual options of a command, `--help-all`, which shows all of them, and `--version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn


class ShowVersion(argparse.Action):
    """The flag `--version`. The version is looked up only where it is asked for."""

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
