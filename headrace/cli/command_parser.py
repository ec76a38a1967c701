"""Parses command lines, and says of a wrong one in a line what is wrong with it and what was probably meant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from headrace.base.errors import EXIT_USAGE

_N = TypeVar("_N")

_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_LIKE = 0.6  # how similar, from 0 to 1, what was meant must be


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line with the nearest option or command, and end the process with code 2.

    The parsers of the commands below it are of the same class.
    """

    def parse_known_args(  # type: ignore[override]  # the stub has an overload for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: _N | None = None
    ) -> tuple[_N | argparse.Namespace, list[str]]:
        """Parse, and take nothing that is unknown: each command knows its own options best."""
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(self._own_words(words))
        found, left = super().parse_known_args(words, namespace)
        if left:
            self._refuse_unknown(left)
            self.error(f"unexpected argument {left[0][:200]!r}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and how to see what there is, and end with code 2."""
        command = self.prog.replace(" [options]", "")
        sys.stderr.write(f"{command}: {message.removeprefix('argument ')} ({command} --help)\n")
        sys.exit(EXIT_USAGE)

    def below(self) -> dict[str, argparse.ArgumentParser]:
        """Return the parsers of the commands below this one, by name."""
        found: dict[str, argparse.ArgumentParser] = {}
        for action in self._actions:
            if action.nargs == argparse.PARSER and isinstance(action.choices, dict):
                found |= action.choices
        return found

    def options(self) -> dict[str, argparse.Action]:
        """Return the options of this command that its help shows, by each of their names."""
        shown = self._option_string_actions.items()
        return {name: action for name, action in shown if action.help != argparse.SUPPRESS}

    def _own_words(self, words: Sequence[str]) -> list[str]:
        """Return the words before the command below this one, whose options are its own."""
        below = self._commands_below()
        own: list[str] = []
        for word in words:
            if word == "--" or word in below:
                break
            own.append(word)
        return own

    def _refuse_unknown(self, words: Iterable[str]) -> None:
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            if not _OPTION.fullmatch(name) or name in known or (name[:2] in known and not name.startswith("--")):
                continue
            self.error(f"there is no option {name[:200]}{_meant(name, known)}")

    def _commands_below(self) -> Collection[str]:
        return [str(name) for action in self._actions if action.nargs == argparse.PARSER for name in action.choices or ()]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a value that is none of the choices."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if action.nargs == argparse.PARSER:
            raise argparse.ArgumentError(None, f"there is no command {str(value)[:200]!r}{_meant(str(value), choices)}")
        raise argparse.ArgumentError(
            action, f"expected one of {', '.join(choices)}, got {str(value)[:200]!r}{_meant(str(value), choices)}"
        )


def _meant(name: str, known: Iterable[str]) -> str:
    import difflib

    found = difflib.get_close_matches(name, [word for word in known if not word.startswith("--no-")], n=1, cutoff=_LIKE)
    return f"; did you mean {found[0]}?" if found else ""
